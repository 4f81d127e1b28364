"""`joinmesh up`: all services of a mesh as child processes, kept alive as Kubernetes would."""
