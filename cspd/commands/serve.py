"""`cspd serve`: a page in the browser, whose visitors share the engines."""

from __future__ import annotations

import argparse
import ipaddress
import os
import re
import socket
import sys
import textwrap
import warnings

from cspd.commands.options import add_model_options, load_engine
from cspd.finding import checkpoint_files
from cspd.known import Resized
from cspd.loading import check_of_one
from cspd.parsing import count, name_list, shortened, whole, word

KEY = "CSPD_API_KEY"  # the environment variable that has the API key

EPILOG = """\
examples:
  cspd serve
      the embedded models, on http://127.0.0.1:8000
  cspd serve --checkpoint pretrained_models/mar/mar_large --vae pretrained_models/vae/kl16.ckpt --max-batch 16
      an official MAR checkpoint, 16 images at a time
  ssh -L 8000:127.0.0.1:8000 machine
      brings the page of a machine that has a GPU to your own browser, with no --host
  CSPD_API_KEY=$(openssl rand -hex 16) cspd serve --host 0.0.0.0
      lets other machines in, if they have the key: the page asks for it once

A visitor chooses a model, a class or a text, a seed, settings, and one or two methods. She sees the pictures grow,
what each token cost, and what each method guarantees. She can paint over a picture and have that part made anew.
docs/serve.md has more.
"""


def add(commands: argparse._SubParsersAction) -> None:
    """Declares the command."""
    text = (
        "Serves a page to browsers: pick a class or write a text, see it made by two methods side by side. Of each"
        " model there is one engine, whose slots all visitors' requests fill. It needs FastAPI and uvicorn: pip install"
        " 'cspd[serve]'."
    )
    serve = commands.add_parser(
        "serve",
        help="show a page in the browser",
        description=textwrap.fill(text, 100),
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    serve.set_defaults(run=run)
    add_model_options(serve, several=True)
    group = serve.add_argument_group("visitors")
    group.add_argument(
        "--host",
        type=word,
        default="127.0.0.1",
        help="address to listen on; 0.0.0.0 lets other machines in: give an API key too (default: %(default)s)",
    )
    group.add_argument("--port", type=whole(0, 65535), default=8000, help="0: any that is free (default: %(default)s)")
    group.add_argument(
        "--api-key",
        type=api_key,
        default=os.environ.get(KEY),
        metavar="KEY",
        help="serve images only to those who give this key. The environment variable CSPD_API_KEY does the same, and"
        " other users of this machine cannot read it",
    )
    group.add_argument(
        "--allowed-hosts",
        type=host_names,
        default=[],
        metavar="NAMES",
        help="names or addresses of this server, beside --host and localhost, in the addresses that browsers show, such"
        " as the name of a proxy: demo.example.org,gpu1",
    )
    group.add_argument(
        "--max-batch", type=count, default=8, help="images of a model in flight at once (default: %(default)s)"
    )
    group.add_argument(
        "--max-requests", type=count, default=32, help="images in flight and waiting, in all (default: %(default)s)"
    )
    group.add_argument(
        "--max-per-visitor", type=count, default=4, help="the same of one visitor (default: %(default)s)"
    )


def run(args: argparse.Namespace) -> None:
    try:
        from cspd.serving.app import Server, make_app
    except ModuleNotFoundError as missing:
        raise ValueError(f"cspd serve needs {missing.name}: pip install 'cspd[serve]'") from None
    names = list(dict.fromkeys(args.checkpoint))
    for name in names:
        checkpoint_files(name)  # raises now, and not when others are loaded
    check_of_one(names, args.arch, args.vae, args.draft_checkpoint, args.eagle, args.text_encoder)

    with listening(args.host, args.port) as listener:
        engines = {name: load_engine(_of(args, name), args.max_batch) for name in names}
        warnings.simplefilter("ignore", Resized)  # the page shows it
        host, port = listener.getsockname()[:2]
        address = ipaddress.ip_address(host)
        access = {
            "hosts": [args.host, host, *args.allowed_hosts],
            "origins": args.allowed_hosts,
            "any_address": not address.is_loopback,
            "key": args.api_key,
        }
        app = make_app(engines, args.max_requests, args.max_per_visitor, **access)
        if not address.is_loopback and args.api_key is None:
            warning = f"anybody who can reach {host}, port {port}, can use this page: give --api-key, or set {KEY}"
            print(f"cspd: warning: {warning}", file=sys.stderr)
        shown = f"[{host}]" if ":" in host else host
        asks = "" if args.api_key is None else "; the page asks for the API key"
        print(f"http://{shown}:{port} serves {', '.join(names)}{asks}; Ctrl-C ends it", flush=True)
        Server(app).run(sockets=[listener])


def _of(args: argparse.Namespace, checkpoint: str) -> argparse.Namespace:
    """The options, of one checkpoint."""
    return argparse.Namespace(**vars(args) | {"checkpoint": checkpoint})


def api_key(text: str) -> str:
    """A key that HTTP headers can have. Raises ArgumentTypeError on another one, whose text it does not repeat."""
    if not re.fullmatch(r"[\x21-\x7e]+", text):
        raise argparse.ArgumentTypeError(f"the key (also of {KEY}) needs ASCII letters, digits or marks, and no spaces")
    return text


def host_names(text: str) -> list[str]:
    """ "demo.example.org,gpu1" to its names."""
    names = name_list(text)
    for name in names:
        if not re.fullmatch(r"[\w.-]+|[\da-f:]+", name, re.ASCII | re.IGNORECASE):
            raise argparse.ArgumentTypeError(
                f"{shortened(name)} is not a host's name: give it without http:// and port"
            )
    return names


def listening(host: str, port: int) -> socket.socket:
    """A socket that listens. Raises OSError where that cannot be."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise OSError(
            f"{host}:{port} cannot be listened on ({error.strerror}): give another --port or --host"
        ) from None
