"""The public door of the decoder: `QwenDecoder`, in `model`; a room each for what it stands on."""

from fuseboard.engine.decoder.model import Draw, QwenDecoder, Token

__all__ = ["Draw", "QwenDecoder", "Token"]
