//! Methods about the program itself.

use serde::Deserialize;
use serde_json::{Value, json};
use signal_hook::consts::signal;

use super::parameters::Nothing;
use super::{SUBSYSTEMS, Stage, Table};
use crate::config::{self, Config};
use crate::rpc::RpcError;
use crate::state::App;

const ANY: &[Stage] = &[Stage::Startup, Stage::Runtime];

pub(super) fn add(table: &mut Table) {
    table.add("rpc_get_methods", ANY, false, get_methods);
    table.add("spdk_get_version", ANY, false, get_version);
    table.add("spdk_kill_instance", ANY, false, kill_instance);
    table.add("framework_wait_init", ANY, false, wait_init);
    table.add("framework_start_init", &[Stage::Startup], false, start_init);
    table.add("framework_get_subsystems", ANY, false, get_subsystems);
    table.add("framework_get_config", ANY, false, get_config);
    table.add("framework_get_reactors", ANY, false, get_reactors);
    table.add("thread_get_stats", ANY, false, thread_stats);
    table.add("thread_get_pollers", ANY, false, thread_pollers);
    table.read("save_config", save_config);
    table.read("load_config", load_config);
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct GetMethods {
    #[serde(default)]
    current: bool,
    /// There are no aliases.
    #[serde(default, rename = "include_aliases")]
    _include_aliases: bool,
}

fn get_methods(app: &App, params: GetMethods) -> Result<Vec<&'static str>, RpcError> {
    Ok(app.table().names(params.current.then(|| app.stage())))
}

fn get_version(_app: &App, _params: Nothing) -> Result<Value, RpcError> {
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

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct KillInstance {
    sig_name: Value,
}

fn kill_instance(_app: &App, params: KillInstance) -> Result<bool, RpcError> {
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
    // The answer goes out first; the signal ends the server.
    let later = move || {
        std::thread::sleep(std::time::Duration::from_millis(50));
        signal_hook::low_level::raise(number)
    };
    std::thread::Builder::new().name("kill".to_string()).spawn(later).map_err(RpcError::internal)?;
    Ok(true)
}

fn wait_init(app: &App, _params: Nothing) -> Result<bool, RpcError> {
    app.wait_started();
    Ok(true)
}

fn start_init(app: &App, _params: Nothing) -> Result<bool, RpcError> {
    match app.finish_startup() {
        Some(config) => config.apply(app).map(|()| true),
        None => Ok(true),
    }
}

fn get_subsystems(_app: &App, _params: Nothing) -> Result<Value, RpcError> {
    let one = |(name, depends_on): (&str, &[&str])| json!({ "subsystem": name, "depends_on": depends_on });
    Ok(Value::Array(SUBSYSTEMS.map(one).into()))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct GetConfig {
    name: String,
    /// There are no batches.
    #[serde(default, rename = "with_batches")]
    _with_batches: bool,
}

fn get_config(app: &App, params: GetConfig) -> Result<Option<Vec<Value>>, RpcError> {
    if !SUBSYSTEMS.iter().any(|(name, _)| *name == params.name) {
        return Err(RpcError::invalid_params(format!("no subsystem is called {}", params.name)));
    }
    Ok(config::subsystem_config(app, &params.name))
}

fn save_config(app: &App, _params: Nothing) -> Result<Value, RpcError> {
    Ok(config::save(app))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct LoadConfig {
    subsystems: Value,
}

fn load_config(app: &App, params: LoadConfig) -> Result<bool, RpcError> {
    let text = json!({ "subsystems": params.subsystems }).to_string();
    let config = Config::parse("load_config", text.as_bytes()).map_err(RpcError::invalid_params)?;
    config.apply(app).map(|()| true)
}

/// Ticks a second.
pub(super) fn tick_rate() -> u64 {
    sys::clock::ns_to_ticks(1_000_000_000)
}

fn get_reactors(app: &App, _params: Nothing) -> Result<Value, RpcError> {
    let mut reactors = Vec::new();
    for reactor in &app.reactors {
        let stats = reactor.remote.stats()?;
        let ticks = sys::clock::ns_to_ticks;
        let (busy, idle) = (ticks(stats.busy_ns), ticks(stats.idle_ns + stats.sleep_ns));
        let index = reactor.remote.index();
        reactors.push(json!({
            "lcore": reactor.remote.cpu(),
            "tid": reactor.thread_id,
            "busy": busy,
            "idle": idle,
            "in_interrupt": false,
            "slept": ticks(stats.sleep_ns),
            "stalls": stats.stalls,
            "turn_max_us": stats.turn_max_ns / 1000,
            "lw_threads": [{
                "name": thread_name(index),
                "id": index + 1,
                "cpumask": cpumask(reactor.remote.cpu()),
                "elapsed": busy + idle,
            }],
        }));
    }
    Ok(json!({ "tick_rate": tick_rate(), "pid": std::process::id(), "reactors": reactors }))
}

fn thread_stats(app: &App, _params: Nothing) -> Result<Value, RpcError> {
    let mut threads = Vec::new();
    for reactor in &app.reactors {
        let stats = reactor.remote.stats()?;
        threads.push(json!({
            "name": thread_name(reactor.remote.index()),
            "id": reactor.remote.index() + 1,
            "cpumask": cpumask(reactor.remote.cpu()),
            "busy": sys::clock::ns_to_ticks(stats.busy_ns),
            "idle": sys::clock::ns_to_ticks(stats.idle_ns + stats.sleep_ns),
            "in_interrupt": false,
            "active_pollers_count": stats.pollers.len(),
            "timed_pollers_count": 0,
            "paused_pollers_count": 0,
        }));
    }
    Ok(json!({ "tick_rate": tick_rate(), "threads": threads }))
}

fn thread_pollers(app: &App, _params: Nothing) -> Result<Value, RpcError> {
    let mut threads = Vec::new();
    for reactor in &app.reactors {
        let pollers = reactor.remote.stats()?.pollers;
        let active = pollers.iter().enumerate().map(|(number, poller)| {
            json!({
                "name": poller.name,
                "id": number + 1,
                "state": "waiting",
                "run_count": poller.runs,
                "busy_count": poller.busy_runs,
                "busy": sys::clock::ns_to_ticks(poller.busy_ns),
            })
        });
        threads.push(json!({
            "name": thread_name(reactor.remote.index()),
            "id": reactor.remote.index() + 1,
            "active_pollers": active.collect::<Vec<_>>(),
            "timed_pollers": [],
            "paused_pollers": [],
        }));
    }
    Ok(json!({ "tick_rate": tick_rate(), "threads": threads }))
}

pub(super) fn thread_name(index: usize) -> String {
    format!("reactor_{index}")
}

fn cpumask(cpu: u32) -> String {
    // Hexadecimal without a prefix, as SPDK prints sets of cores.
    let digits = cpu as usize / 4;
    format!("{:x}{}", 1u32 << (cpu % 4), "0".repeat(digits))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn masks_are_hexadecimal_at_any_core() {
        assert_eq!([0, 3, 4, 65].map(cpumask), ["1", "8", "10", "20000000000000000"]);
    }
}
