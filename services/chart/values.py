"""The values of the chart as types: every key, its default and its meaning, said once.

Invariant: `values.yaml`, `values.schema.json` and the table in the chart's README are made from these types alone.
Where a value is handed to Kubernetes as it is (tolerations, affinity, …), Kubernetes checks it.
"""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field

from services.chart.mesh import NAME, MeshFile, table

Quantity = Annotated[str, Meta(pattern=r"^[0-9]+(\.[0-9]+)?(m|k|Ki|M|Mi|G|Gi|T|Ti)?$")]
Duration = Annotated[str, Meta(pattern="^([0-9]+(ms|s|m|h))+$")]
Seconds = Annotated[int, Meta(ge=1)]
_SERVICE = r"^(controller|ingest|audit|admin|host|[A-Za-z_][A-Za-z0-9_]*\.(sink|j[1-9][0-9]*))$"


def _said(what: str) -> Any:
    return Meta(description=what)


class Value(Struct, forbid_unknown_fields=True, kw_only=True, rename="camel"):
    """What all of them share: a key that is not there is refused."""


class Image(Value):
    repository: Annotated[str, _said("name of the image, with the registry if it is not the cluster's own")]
    tag: Annotated[str, _said("default: the version of the chart's app")] = ""
    digest: Annotated[str, Meta(description="`sha256:…`; wins over the tag", pattern="^(sha256:[0-9a-f]{64})?$")] = ""
    pull_policy: Annotated[Literal["IfNotPresent", "Always", "Never"], _said("when the image is fetched")] = (
        "IfNotPresent"
    )


class Kafka(Value):
    existing_secret: Annotated[
        str, _said("Secret whose keys lie in /etc/joinmesh/kafka of every pod: username, password, tls.crt, …")
    ] = ""
    secrets: Annotated[
        dict[str, str],
        table(
            _SERVICE,
            "Secret of one service, for a principal each: `controller`, `ingest`, `<query>.j1`, `<query>.sink`,"
            " `audit`, `admin` (creates topics), `host` (services that share a pod)",
        ),
    ] = {}
    ca_secret: Annotated[str, _said("Secret with `ca.crt`, put beside the others in /etc/joinmesh/kafka")] = ""


class Http(Value):
    token_secret: Annotated[str, _said("Secret with the key `token`: /metrics asks for it as a bearer token")] = ""
    tls_secret: Annotated[str, _said("Secret with `tls.crt` and `tls.key`: HTTP becomes HTTPS")] = ""


class Request(Value):
    cpu: Annotated[Quantity, _said("CPU that is kept free for it")] = "250m"
    memory: Annotated[Quantity, _said("memory that is kept free for it")] = "512Mi"


class Limit(Value):
    memory: Annotated[Quantity, _said("memory at which it is killed")] = "1Gi"
    cpu: Annotated[
        str, Meta(description="most CPU it may take; empty: no limit", pattern=r"^([0-9]+(\.[0-9]+)?m?)?$")
    ] = ""


class Resources(Value):
    requests: Request = field(default_factory=Request)
    limits: Limit = field(default_factory=Limit)


def _resources(cpu: str, memory: str, limit: str) -> Any:
    return field(
        default_factory=lambda: Resources(requests=Request(cpu=cpu, memory=memory), limits=Limit(memory=limit))
    )


class Scheduling(Value):
    node_selector: Annotated[dict[str, str], _said("labels of the nodes it may run on")] = {}
    tolerations: Annotated[list[dict[str, Any]], _said("taints it tolerates")] = []
    affinity: Annotated[dict[str, Any], _said("affinity, as Kubernetes has it")] = {}
    priority_class_name: Annotated[str, _said("its priority class")] = ""
    pod_annotations: Annotated[dict[str, str], _said("more annotations of its pods")] = {}


class Storage(Value):
    size: Annotated[Quantity, _said("of each pod's volume; about two windows of each input")] = "10Gi"
    class_name: Annotated[str, _said("storage class; empty: the cluster's default")] = ""
    when_deleted: Annotated[Literal["Retain", "Delete"], _said("what becomes of volumes at `helm uninstall`")] = (
        "Retain"
    )
    when_scaled: Annotated[
        Literal["Retain", "Delete"],
        _said("what becomes of a volume whose pod is scaled away; state is rebuilt from Kafka"),
    ] = "Delete"


class Controller(Scheduling):
    resources: Resources = _resources("100m", "192Mi", "512Mi")


class Ingest(Scheduling):
    resources: Resources = _resources("250m", "512Mi", "1Gi")


class Sink(Scheduling):
    resources: Resources = _resources("250m", "512Mi", "1Gi")


class JoinNode(Scheduling):
    resources: Resources = _resources("250m", "512Mi", "1Gi")
    storage: Storage = field(default_factory=Storage)


class Host(Scheduling):
    groups: Annotated[
        dict[str, Annotated[list[str], Meta(min_length=1)]],
        table(
            "^[a-z]([a-z0-9-]{0,18}[a-z0-9])?$",
            "services that share a process: `name: [paid_orders.j1, paid_orders.sink]`. `mesh.placement: together` is"
            " one group of all",
        ),
    ] = {}
    resources: Resources = _resources("500m", "1Gi", "2Gi")
    storage: Storage = field(default_factory=Storage)


class Topics(Value):
    enabled: Annotated[
        bool,
        _said("before each install and upgrade: check the mesh, create missing topics, check those that are there"),
    ] = True
    timeout_seconds: Annotated[Seconds, _said("after which the check has failed")] = 120
    resources: Resources = _resources("100m", "256Mi", "512Mi")


class Spark(Value):
    master: Annotated[
        str,
        Meta(description="`local[*]`: in the audit's own pod; or a cluster", pattern=r"^(local(\[.+\])?|spark://.+)$"),
    ] = "local[*]"
    memory: Annotated[str, Meta(description="of Spark's driver", pattern="^[0-9]+[mg]$")] = "2g"
    conf: Annotated[dict[str, str], _said("lines of spark-defaults.conf")] = {}
    peers: Annotated[
        list[dict[str, Any]],
        _said("NetworkPolicy peers of master and executors, if the master is a cluster; empty: any"),
    ] = []
    scratch: Annotated[Quantity, _said("disk for what Spark sorts")] = "10Gi"


class Audit(Scheduling):
    enabled: Annotated[bool, _said("have the audit at hand as a CronJob")] = True
    schedule: Annotated[
        str, _said("when it runs, as cron has it; empty: only on demand (`kubectl create job --from=cronjob/…`)")
    ] = ""
    now: Annotated[
        str,
        Meta(
            description="a new word here runs it once with this install or upgrade, as a Job of that name",
            pattern="^([a-z0-9]([a-z0-9-]{0,18}[a-z0-9])?)?$",
        ),
    ] = ""
    timeout_seconds: Annotated[Seconds, _said("after which a run has failed")] = 3600
    reports_claim: Annotated[str, _said("an existing PersistentVolumeClaim that keeps audit.html and audit.json")] = ""
    spark: Spark = field(default_factory=Spark)
    resources: Resources = _resources("500m", "3Gi", "4Gi")


class Backfill(Scheduling):
    enabled: Annotated[
        bool, _said("a Job of `joinmesh backfill`; leave it off: this version of joinmesh has no such command")
    ] = False
    query: Annotated[str, Meta(description="the query whose state is built", pattern="^([A-Za-z_][A-Za-z0-9_]*)?$")] = (
        ""
    )
    timeout_seconds: Annotated[Seconds, _said("after which it has failed")] = 3600
    resources: Resources = _resources("500m", "3Gi", "4Gi")


class ServiceMonitor(Value):
    enabled: Annotated[bool, _said("needs the Prometheus operator's CRDs")] = False
    interval: Annotated[Duration, _said("how often metrics are read")] = "30s"
    labels: Annotated[dict[str, str], _said("what your Prometheus selects by")] = {}


class Rules(Value):
    enabled: Annotated[bool, _said("alerts; needs the Prometheus operator's CRDs")] = False
    labels: Annotated[dict[str, str], _said("what your Prometheus selects by")] = {}
    watermark_stands_still: Annotated[Duration, _said("how long a watermark may not move")] = "10m"
    lag_grows: Annotated[Duration, _said("how long lag may grow")] = "15m"
    lag_records: Annotated[int, Meta(description="lag below this is never an alert", ge=0)] = 1000
    disk_free_percent: Annotated[int, Meta(description="how much of a volume must be free", ge=1, le=99)] = 15


class Dashboard(Value):
    enabled: Annotated[bool, _said("the Grafana dashboard as a ConfigMap")] = False
    labels: Annotated[dict[str, str], _said("what Grafana's sidecar selects by")] = field(
        default_factory=lambda: {"grafana_dashboard": "1"}
    )


class Monitoring(Value):
    service_monitor: ServiceMonitor = field(default_factory=ServiceMonitor)
    rules: Rules = field(default_factory=Rules)
    dashboard: Dashboard = field(default_factory=Dashboard)


class NetworkPolicy(Value):
    enabled: Annotated[bool, _said("let pods reach only Kafka and DNS, and be reached only for metrics")] = True
    kafka_ports: Annotated[list[int], _said("empty: the ports of `mesh.kafka.bootstrap`")] = []
    kafka_peers: Annotated[list[dict[str, Any]], _said("where Kafka is; empty: anywhere, on its ports")] = []
    metrics_peers: Annotated[list[dict[str, Any]], _said("who may read metrics; empty: anyone in the cluster")] = []
    extra_egress: Annotated[list[dict[str, Any]], _said("more egress rules, such as a token endpoint")] = []


class TopologySpread(Value):
    enabled: Annotated[bool, _said("spread the pods of one service")] = True
    topology_key: Annotated[str, _said("over what")] = "kubernetes.io/hostname"
    when_unsatisfiable: Annotated[
        Literal["ScheduleAnyway", "DoNotSchedule"], _said("what happens if it cannot be done")
    ] = "ScheduleAnyway"


class Check(Value):
    events: Annotated[
        int,
        Meta(
            description="sample events that `helm test` writes to each source topic, to see their results come out;"
            " 0: only look. They are real events to every reader of those topics",
            ge=0,
            le=500,
        ),
    ] = 0
    timeout_seconds: Annotated[Seconds, _said("after which `helm test` has failed")] = 120
    resources: Resources = _resources("100m", "256Mi", "512Mi")


class Values(Value):
    mesh: Annotated[MeshFile, _said("the mesh file, key by key")]
    nodes: Annotated[
        dict[str, Annotated[int, Meta(ge=1)]],
        table(NAME, "join nodes of a query, where the chart counts them wrongly"),
    ] = {}
    name_override: Annotated[str, _said("instead of the chart's name in names")] = ""
    fullname_override: Annotated[str, _said("instead of release and chart name in names")] = ""
    image: Image = field(default_factory=lambda: Image(repository="joinmesh"))
    spark_image: Image = field(default_factory=lambda: Image(repository="joinmesh-spark"))
    image_pull_secrets: Annotated[list[dict[str, str]], _said("`[{name: …}]`")] = []
    kafka: Kafka = field(default_factory=Kafka)
    http: Http = field(default_factory=Http)
    log_level: Annotated[Literal["DEBUG", "INFO", "WARNING", "ERROR"], _said("how much services log")] = "INFO"
    extra_env: Annotated[list[dict[str, Any]], _said("more environment of every container, as Kubernetes has it")] = []
    controller: Controller = field(default_factory=Controller)
    ingest: Ingest = field(default_factory=Ingest)
    join_node: JoinNode = field(default_factory=JoinNode)
    sink: Sink = field(default_factory=Sink)
    host: Host = field(default_factory=Host)
    topics: Topics = field(default_factory=Topics)
    audit: Audit = field(default_factory=Audit)
    backfill: Backfill = field(default_factory=Backfill)
    monitoring: Monitoring = field(default_factory=Monitoring)
    network_policy: NetworkPolicy = field(default_factory=NetworkPolicy)
    pod_disruption_budget: Annotated[bool, _said("let a drain take one pod of a service at a time")] = True
    topology_spread: TopologySpread = field(default_factory=TopologySpread)
    termination_grace_period_seconds: Annotated[
        Seconds, _said("a service stops within 30 s; then it is killed, which loses nothing")
    ] = 45
    test: Check = field(default_factory=Check)
