def exact_prefill_torch(*args):
    raise NotImplementedError


def exact_decode_torch(*args):
    raise NotImplementedError
