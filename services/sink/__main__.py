from services.runtime.service import run_service
from services.sink.loop import serve

run_service("sink", serve)
