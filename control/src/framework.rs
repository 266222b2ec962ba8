//! The control plane's own methods: what is registered, configuration, jobs, reactors, version.

use serde_json::{Value, json};
use signal_hook::consts::signal;

use crate::config::ConfigFile;
use crate::logging;
use crate::metrics::{Metric, MetricSamples};
use crate::parameters::NoParameters;
use crate::{ControlPlane, ManagedReactor, Method, Module, RpcError, processor};

/// The module of the control plane itself.
pub(crate) struct Framework;

impl Module for Framework {
    const NAME: &'static str = "framework";

    fn methods() -> Vec<Method<Framework>> {
        let mut methods = vec![
            Method::of_plane("rpc_get_methods", get_methods)
                .at_any_stage()
                .text("Lists the methods.", "array of names"),
            Method::of_plane("spdk_get_version", get_version)
                .at_any_stage()
                .text("Names the version of Ringbolt.", "`version` and its `fields`"),
            Method::of_plane("spdk_kill_instance", kill_instance)
                .at_any_stage()
                .text("Sends a signal to the server, after the response.", "true"),
            Method::of_plane("framework_wait_init", wait_init)
                .at_any_stage()
                .text("Waits until the start-up stage (`--wait-for-rpc`) has ended.", "true"),
            Method::of_plane("framework_start_init", start_init)
                .at_startup()
                .text("Ends the start-up stage and applies the configuration file.", "true"),
            Method::of_plane("framework_get_subsystems", get_subsystems)
                .at_any_stage()
                .text("Lists the subsystems in the order of their start.", "array of `subsystem`, `depends_on`"),
            Method::of_plane("framework_get_config", get_config)
                .at_any_stage()
                .text("Saves the configuration of one subsystem.", "array of calls"),
            Method::of_plane("framework_get_modules", get_modules)
                .at_any_stage()
                .text("Lists the modules with what they report. Not an SPDK method.",
                    "array of `name`, `depends_on`, `methods`, `report`"),
            Method::of_plane("framework_get_reactors", get_reactors)
                .at_any_stage()
                .text("Times of each reactor. `irq`, `sys` and `usr` are of its processor since the machine started, with \
                    all that ran there, in the kernel's clock ticks.", "`tick_rate`, `pid`, `reactors`"),
            Method::of_plane("thread_get_stats", thread_stats)
                .at_any_stage()
                .text("Times of each reactor, as SPDK's threads.", "`tick_rate`, `threads`"),
            Method::of_plane("thread_get_pollers", thread_pollers)
                .at_any_stage()
                .text("Runs and times of each poller.", "`tick_rate`, `threads`"),
            Method::of_plane("thread_set_cpumask", set_cpumask)
                .text(
                    "Sets on which cores is served what the thread serves. A thread is a reactor, which stays \
                     on its core. If that is not among the cores, its connections move to the reactors on them, \
                     each between two commands, and it gets no other; connections that cannot move stay \
                     (docs/SCHEDULING.md). Not saved, as in SPDK.",
                    "true",
                )
                .errors(&[(
                    RpcError::INVALID_PARAMS,
                    "there is no such thread, or its connections could be on no core, because there is no \
                     reactor on any of these, or because of the masks of other threads",
                )]),
            Method::of_plane("metrics_get", get_metrics)
                .text("The present values of the metrics that docs/METRICS.md lists. Not an SPDK method.",
                    "array of `name`, `kind`, `unit`, `help` and `samples`: `labels` with `value`, or, of a histogram, \
                        `buckets` (`le`, `count`), `count` and `sum`")
                .errors(&[(RpcError::INVALID_PARAMS, "there is no such metric")]),
            Method::of_plane("metrics_get_openmetrics", get_openmetrics)
                .text("The same as OpenMetrics 1.0.0 text. Not an SPDK method.", "the text"),
            Method::of_plane("save_config", save_config)
                .text("The running configuration, as a file that recreates it.", "`subsystems`")
                .errors(&[(
                    RpcError::EBUSY,
                    "a key that was removed is in use: the file could not be loaded",
                )]),
            Method::of_plane("load_config", load_config)
                .text("Applies a configuration. Stops at the first call that fails.", "true"),
            Method::of_plane("job_get", get_jobs)
                .text("Lists the methods that run as jobs, the examinations of devices that take long, and \
                     those that have ended lately. Not an SPDK method.",
                    "array of `job`, `method`, `bdev`, `state`, `seconds`, `done`, `total`, `unit`, `result` or `error`")
                .errors(&[(RpcError::ENODEV, "there is no such job")]),
            Method::of_plane("job_cancel", cancel_job)
                .text("Requests the end of a job. Not an SPDK method.", "true")
                .errors(&[
                    (RpcError::ENODEV, "there is no such job"),
                    (RpcError::EALREADY, "it has ended"),
                    (RpcError::EBUSY, "it has passed the point from which it cannot be cancelled"),
                ]),
        ];
        methods.extend(logging::methods());
        methods
    }

    fn metrics() -> Vec<&'static Metric> {
        REACTOR_METRICS.to_vec()
    }
}

crate::metrics! {
    /// Of the reactors.
    static REACTOR_METRICS {
        /// Time in which a reactor did work
        BUSY = "ringbolt_reactor_busy_seconds": counter ("seconds") [reactor];
        /// Time in which a reactor looked for work and found none
        IDLE = "ringbolt_reactor_idle_seconds": counter ("seconds") [reactor];
        /// Time in which a reactor slept
        SLEPT = "ringbolt_reactor_slept_seconds": counter ("seconds") [reactor];
        /// Turns of a reactor that took so long that the log has a line about them
        STALLS = "ringbolt_reactor_stalls": counter [reactor];
    }
}

/// The values of the reactors' metrics; those of a reactor that does not answer are missing.
pub(crate) fn collect_reactors(plane: &ControlPlane, samples: &mut MetricSamples) {
    for reactor in plane.reactors() {
        let Ok(stats) = reactor.handle.stats() else { continue };
        let index = reactor.handle.index().to_string();
        for (metric, ns) in [(&BUSY, stats.busy_ns), (&IDLE, stats.idle_ns), (&SLEPT, stats.sleep_ns)] {
            samples.add(metric, &[&index], ns as f64 / 1e9);
        }
        samples.add(&STALLS, &[&index], stats.stalls);
    }
}

crate::parameters! {
    struct GetMetrics {
        /// One metric; all without
        name: Option<String>,
    }
}

fn get_metrics(plane: &ControlPlane, params: GetMetrics) -> Result<Vec<Value>, RpcError> {
    if let Some(name) = &params.name
        && !plane.catalog().metrics().any(|metric| metric.name == name)
    {
        return Err(RpcError::invalid_params(format!("name: no metric is called {name}")));
    }
    Ok(plane.metrics().to_json(params.name.as_deref()))
}

fn get_openmetrics(plane: &ControlPlane, _params: NoParameters) -> Result<String, RpcError> {
    Ok(plane.metrics().openmetrics())
}

crate::parameters! {
    struct GetMethods {
        /// Only those that may be called now
        current: bool = false,
        /// No method has aliases
        include_aliases: bool = false,
    }
}

fn get_methods(plane: &ControlPlane, params: GetMethods) -> Result<Vec<&'static str>, RpcError> {
    Ok(plane.catalog().names(params.current.then(|| plane.stage())))
}

fn get_version(_plane: &ControlPlane, _params: NoParameters) -> Result<Value, RpcError> {
    let number = |text: &str| text.parse::<u64>().unwrap_or(0);
    Ok(json!({
        "version": concat!("Ringbolt v", env!("CARGO_PKG_VERSION")),
        "fields": {
            "major": number(env!("CARGO_PKG_VERSION_MAJOR")),
            "minor": number(env!("CARGO_PKG_VERSION_MINOR")),
            "patch": number(env!("CARGO_PKG_VERSION_PATCH")),
            "suffix": env!("CARGO_PKG_VERSION_PRE"),
        },
    }))
}

crate::parameters! {
    struct KillInstance {
        /// SIGINT, SIGTERM, SIGQUIT, SIGHUP, SIGKILL or SIGUSR1, or its number
        sig_name: Value,
    }
}

fn kill_instance(_plane: &ControlPlane, params: KillInstance) -> Result<bool, RpcError> {
    let known = [
        ("SIGINT", signal::SIGINT),
        ("SIGTERM", signal::SIGTERM),
        ("SIGQUIT", signal::SIGQUIT),
        ("SIGHUP", signal::SIGHUP),
        ("SIGKILL", signal::SIGKILL),
        ("SIGUSR1", signal::SIGUSR1),
    ];
    let wanted = |name: &str, number: i32| match &params.sig_name {
        Value::String(text) => text == name || Some(text.as_str()) == name.strip_prefix("SIG"),
        Value::Number(value) => value.as_i64() == Some(i64::from(number)),
        _ => false,
    };
    let Some((_, number)) = known.iter().find(|(name, number)| wanted(name, *number)) else {
        let names: Vec<&str> = known.iter().map(|(name, _)| *name).collect();
        return Err(RpcError::invalid_params(format!("sig_name is one of {}", names.join(", "))));
    };
    let number = *number;
    // Delayed, so that the response is sent before the signal ends the server.
    let raise = move || {
        std::thread::sleep(std::time::Duration::from_millis(50));
        signal_hook::low_level::raise(number)
    };
    std::thread::Builder::new().name("kill".to_string()).spawn(raise).map_err(RpcError::internal)?;
    Ok(true)
}

fn wait_init(plane: &ControlPlane, _params: NoParameters) -> Result<bool, RpcError> {
    plane.wait_started();
    Ok(true)
}

fn start_init(plane: &ControlPlane, _params: NoParameters) -> Result<bool, RpcError> {
    match plane.finish_startup() {
        Some(config) => config.apply(plane).map(|()| true),
        None => Ok(true),
    }
}

fn get_subsystems(plane: &ControlPlane, _params: NoParameters) -> Result<Value, RpcError> {
    let is_subsystem = |name: &&&str| plane.subsystems().any(|other| other.name() == **name);
    let one = |module: &std::sync::Arc<dyn crate::module::DynModule>| {
        let depends_on: Vec<&&str> = module.depends_on().iter().filter(is_subsystem).collect();
        json!({ "subsystem": module.name(), "depends_on": depends_on })
    };
    Ok(plane.subsystems().map(one).collect())
}

crate::parameters! {
    struct GetConfig {
        /// Name of the subsystem
        name: String,
        /// Saved configurations have no batches
        with_batches: bool = false,
    }
}

/// SPDK's subsystems that have nothing to configure here, and so no module. A configuration may name them.
const EMPTY_SUBSYSTEMS: [&str; 3] = ["scsi", "vfio_user_target", "vmd"];

fn get_config(plane: &ControlPlane, params: GetConfig) -> Result<Vec<Value>, RpcError> {
    match plane.save_subsystem(&params.name) {
        Some(calls) => Ok(calls),
        None if EMPTY_SUBSYSTEMS.contains(&params.name.as_str()) => Ok(Vec::new()),
        None => Err(RpcError::invalid_params(format!("no subsystem is called {}", params.name))),
    }
}

fn get_modules(plane: &ControlPlane, _params: NoParameters) -> Result<Value, RpcError> {
    let one = |module: &std::sync::Arc<dyn crate::module::DynModule>| {
        let methods = plane.catalog().iter().filter(|info| info.module == module.name()).count();
        json!({ "name": module.name(), "depends_on": module.depends_on(), "methods": methods,
            "report": module.report() })
    };
    Ok(plane.modules().iter().map(one).collect())
}

fn save_config(plane: &ControlPlane, _params: NoParameters) -> Result<Value, RpcError> {
    match plane.modules().iter().find_map(|module| module.not_loadable()) {
        Some(reason) => Err(RpcError::new(RpcError::EBUSY, reason)),
        None => Ok(plane.save()),
    }
}

crate::parameters! {
    struct LoadConfig {
        /// As in a configuration file
        subsystems: Value,
    }
}

fn load_config(plane: &ControlPlane, params: LoadConfig) -> Result<bool, RpcError> {
    let text = json!({ "subsystems": params.subsystems }).to_string();
    let config = ConfigFile::parse("load_config", text.as_bytes(), plane.catalog())
        .map_err(RpcError::invalid_params)?;
    config.apply(plane).map(|()| true)
}

crate::parameters! {
    struct GetJobs {
        /// One job; all without
        job: Option<u64>,
    }
}

fn get_jobs(plane: &ControlPlane, params: GetJobs) -> Result<Vec<Value>, RpcError> {
    plane.jobs().describe(params.job)
}

crate::parameters! {
    struct CancelJob {
        /// Its handle
        job: u64,
    }
}

fn cancel_job(plane: &ControlPlane, params: CancelJob) -> Result<bool, RpcError> {
    plane.jobs().cancel(params.job).map(|()| true)
}

/// Clock ticks per second: the unit of all `_ticks`, `busy` and `idle` results.
pub fn tick_rate() -> u64 {
    os::clock::ns_to_ticks(1_000_000_000)
}

fn get_reactors(plane: &ControlPlane, _params: NoParameters) -> Result<Value, RpcError> {
    let mut reactors = Vec::new();
    for reactor in plane.reactors() {
        let stats = reactor.handle.stats()?;
        let ticks = os::clock::ns_to_ticks;
        let (busy, idle) = (ticks(stats.busy_ns), ticks(stats.idle_ns + stats.sleep_ns));
        let (index, cpu) = (reactor.handle.index(), reactor.handle.cpu());
        let times = processor::times(cpu);
        reactors.push(json!({
            "lcore": cpu,
            "numa_id": processor::numa_node(cpu),
            "tid": reactor.thread_id,
            "busy": busy,
            "idle": idle,
            "in_interrupt": false,
            "irq": times.interrupts,
            "sys": times.system,
            "usr": times.user,
            "slept": ticks(stats.sleep_ns),
            "stalls": stats.stalls,
            "turn_max_us": stats.turn_max_ns / 1000,
            "lw_threads": [{
                "name": thread_name(index),
                "id": index + 1,
                "cpumask": thread_cpumask(plane, reactor),
                "elapsed": busy + idle,
            }],
        }));
    }
    Ok(json!({ "tick_rate": tick_rate(), "pid": std::process::id(), "reactors": reactors }))
}

fn thread_stats(plane: &ControlPlane, _params: NoParameters) -> Result<Value, RpcError> {
    let mut threads = Vec::new();
    for reactor in plane.reactors() {
        let stats = reactor.handle.stats()?;
        threads.push(json!({
            "name": thread_name(reactor.handle.index()),
            "id": reactor.handle.index() + 1,
            "cpumask": thread_cpumask(plane, reactor),
            "busy": os::clock::ns_to_ticks(stats.busy_ns),
            "idle": os::clock::ns_to_ticks(stats.idle_ns + stats.sleep_ns),
            "in_interrupt": false,
            "active_pollers_count": stats.pollers.len(),
            "timed_pollers_count": 0,
            "paused_pollers_count": 0,
        }));
    }
    Ok(json!({ "tick_rate": tick_rate(), "threads": threads }))
}

crate::parameters! {
    struct SetCpumask {
        /// Identifier of the thread, as `thread_get_stats` reports it
        id: u64,
        /// Cores: a hexadecimal mask, or a list in brackets
        cpumask: String,
    }
}

fn set_cpumask(plane: &ControlPlane, params: SetCpumask) -> Result<bool, RpcError> {
    let SetCpumask { id, cpumask } = params;
    let cpus = os::CpuSet::from_mask(&cpumask)
        .map_err(|error| RpcError::invalid_params(format!("cpumask: {error}")))?;
    let is_thread = |reactor: &&ManagedReactor| reactor.handle.index() as u64 + 1 == id;
    let Some(reactor) = plane.reactors().iter().find(is_thread) else {
        return Err(RpcError::invalid_params(format!("id: there is no thread {id}")));
    };
    let set = plane.balancer().set_mask(reactor.handle.index(), cpus.cpus());
    set.map_err(|reason| RpcError::invalid_params(format!("cpumask: {cpumask}: {reason}")))?;
    Ok(true)
}

/// The cores of a thread: of the mask that was set, or its own.
fn thread_cpumask(plane: &ControlPlane, reactor: &ManagedReactor) -> String {
    let set = plane.balancer().mask(reactor.handle.index());
    cpumask(&set.unwrap_or_else(|| vec![reactor.handle.cpu()]))
}

fn thread_pollers(plane: &ControlPlane, _params: NoParameters) -> Result<Value, RpcError> {
    let mut threads = Vec::new();
    for reactor in plane.reactors() {
        let pollers = reactor.handle.stats()?.pollers;
        let active = pollers.iter().enumerate().map(|(number, poller)| {
            json!({
                "name": poller.name,
                "id": number + 1,
                "state": "waiting",
                "run_count": poller.runs,
                "busy_count": poller.busy_runs,
                "busy": os::clock::ns_to_ticks(poller.busy_ns),
            })
        });
        threads.push(json!({
            "name": thread_name(reactor.handle.index()),
            "id": reactor.handle.index() + 1,
            "active_pollers": active.collect::<Vec<_>>(),
            "timed_pollers": [],
            "paused_pollers": [],
        }));
    }
    Ok(json!({ "tick_rate": tick_rate(), "threads": threads }))
}

/// Name of the SPDK thread that stands for a reactor.
pub fn thread_name(index: usize) -> String {
    format!("reactor_{index}")
}

/// Hexadecimal without a prefix, as in SPDK.
fn cpumask(cpus: &[u32]) -> String {
    let last = cpus.iter().max().copied().unwrap_or(0);
    let bit = |cpu: u32| u32::from(cpus.contains(&cpu)) << (cpu % 4);
    let digit = |digit: u32| (0..4).map(|place| bit(digit * 4 + place)).sum();
    (0..=last / 4).rev().filter_map(|place| char::from_digit(digit(place), 16)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_accepts_cores_with_its_own_or_another_reactor() {
        let reactors = reactor::Reactors::start(&reactor::ReactorConfig::default()).unwrap();
        let handle = reactors.handles()[0].clone();
        let cpu = handle.cpu();
        let plane = ControlPlane::builder(vec![ManagedReactor { handle, thread_id: 0 }]).start(None).unwrap();
        let set = |id: u64, cpumask: &str| {
            let params = json!({ "id": id, "cpumask": cpumask });
            plane.invoke("thread_set_cpumask", params).map_err(|error| error.message)
        };
        let reported = || {
            let stats = plane.invoke("thread_get_stats", Value::Null).unwrap();
            let reactors = plane.invoke("framework_get_reactors", Value::Null).unwrap();
            let mask = &stats["threads"][0]["cpumask"];
            assert_eq!(*mask, reactors["reactors"][0]["lw_threads"][0]["cpumask"]);
            mask.as_str().unwrap().to_string()
        };
        assert_eq!(set(1, &cpumask(&[cpu])), Ok(json!(true)));
        assert_eq!(reported(), cpumask(&[cpu]));
        assert_eq!(set(1, &format!("[{cpu},{}]", cpu + 1)), Ok(json!(true)));
        assert_eq!(reported(), cpumask(&[cpu, cpu + 1]));
        for (id, cpumask, expected) in [
            (1, format!("[{}]", cpu + 1), "no reactor on any of its cores".to_string()),
            (2, cpumask(&[cpu]), "there is no thread 2".to_string()),
            (1, "fast".to_string(), "cpumask: ".to_string()),
        ] {
            let message = set(id, &cpumask).unwrap_err();
            assert!(message.contains(&expected), "{message}");
        }
        assert_eq!(reported(), cpumask(&[cpu, cpu + 1]), "what failed has changed nothing");
    }

    #[test]
    fn cpumasks_are_hexadecimal_for_any_core() {
        let of = [&[0][..], &[3], &[4], &[65], &[0, 1, 5]].map(cpumask);
        assert_eq!(of, ["1", "8", "10", "20000000000000000", "23"]);
    }
}
