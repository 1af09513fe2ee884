"""What the pool's decisions are made of: pure parts, which know no clock, thread, system or torch.

This package imports itself and pure parts of the standard library, and nothing else. It runs in the
caller only.

    story     what happened to each call, and when
"""
