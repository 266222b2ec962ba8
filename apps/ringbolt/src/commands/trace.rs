//! `ringbolt trace`: the recent I/O of a running server, event by event.

use std::collections::HashMap;
use std::path::PathBuf;

use clap::Args;
use comfy_table::{CellAlignment, Table};
use serde_json::{Value, json};

use super::rpc;
use crate::command_error::CommandError;
use crate::console::stdout_line;
use crate::options::DEFAULT_SOCKET;

/// Options of `ringbolt trace`.
#[derive(Args)]
#[command(after_help = "Examples:\n  \
    ringbolt trace --enable          # from now on each core keeps its last 8,191 events\n  \
    ringbolt trace --count 20        # the last events, with the time since each I/O started\n  \
    ringbolt trace --json --core 2 > events.json\n  \
    ringbolt trace --disable\n\n\
    The trace is off at first, and then costs nothing. It is trace_enable_tpoint_group name=bdev and \
    trace_get_events of `ringbolt rpc`, where trace_set_tpoint_mask selects some of the trace points.")]
pub(crate) struct Trace {
    /// Enable the trace, and print nothing
    #[arg(long)]
    enable: bool,
    /// Disable the trace, and print nothing; what it has recorded is kept
    #[arg(long, conflicts_with = "enable")]
    disable: bool,
    /// How many of the last events to print
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    count: u32,
    /// Only events of the core with this index
    #[arg(long)]
    core: Option<u32>,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// UNIX socket of the server
    #[arg(short, long, value_name = "PATH", default_value = DEFAULT_SOCKET)]
    rpc_socket: PathBuf,
}

/// Runs `ringbolt trace`.
pub(crate) fn run(options: Trace) -> Result<(), CommandError> {
    let call = |method: &str, params| rpc::call(&options.rpc_socket, method, params, rpc::QUERY_TIMEOUT);
    if options.enable {
        return call("trace_enable_tpoint_group", json!({ "name": "bdev" })).map(drop);
    }
    if options.disable {
        return call("trace_disable_tpoint_group", json!({ "name": "bdev" })).map(drop);
    }
    if let Some(core) = options.core {
        let reactors = call("framework_get_reactors", Value::Null)?;
        let cores = reactors["reactors"].as_array().map_or(0, Vec::len);
        if core as usize >= cores {
            return Err(CommandError::operation(format!(
                "--core={core}: the server has {cores} core(s), from 0"
            )));
        }
    }
    let mut trace = call("trace_get_events", json!({ "count": options.count, "core": options.core }))?;
    let events = trace["events"].as_array().map_or(0, Vec::len);
    if options.json {
        stdout_line!("{trace:#}");
    } else if events > 0 {
        let events = trace["events"].take();
        stdout_line!("{}", table(&events, trace["tick_rate"].as_f64().unwrap_or(1e9)));
    } else if call("trace_get_info", Value::Null)?["tpoint_group_mask"] == "0x0" {
        return Err(CommandError::operation(
            "the trace is disabled; enable it with `ringbolt trace --enable`",
        ));
    }
    Ok(())
}

/// The events, with times in microseconds since the first.
fn table(events: &Value, tick_rate: f64) -> Table {
    let events = events.as_array().map(Vec::as_slice).unwrap_or_default();
    let ticks = |event: &Value| event["tsc"].as_u64().unwrap_or_default();
    let micros =
        |since: u64, until: u64| format!("{:.3}", until.saturating_sub(since) as f64 * 1e6 / tick_rate);
    let text = |value: &Value| match value {
        Value::String(text) => text.clone(),
        Value::Null => String::new(),
        other => other.to_string(),
    };
    let mut table = Table::new();
    table.load_style(comfy_table::presets::NOTHING);
    table.set_header(["us", "core", "tpoint", "bdev", "tag", "op", "lba", "blocks", "status", "took us"]);
    for index in [0, 6, 7, 9] {
        if let Some(column) = table.column_mut(index) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    let first = events.first().map(ticks).unwrap_or_default();
    let mut started = HashMap::new();
    for event in events {
        let key = (event["core"].as_u64(), event["bdev_id"].as_u64(), text(&event["tag"]));
        let took = match event["tpoint"].as_str() {
            Some("BDEV_IO_START") => {
                started.insert(key, ticks(event));
                None
            }
            Some("BDEV_IO_DONE") => started.remove(&key).map(|since| micros(since, ticks(event))),
            Some("BDEV_IO_RETURNED") => {
                started.remove(&key);
                None
            }
            _ => None,
        };
        let mut cells = vec![micros(first, ticks(event))];
        // What is gone has its number; an event of a connection has its target and tenant.
        let name_of = |name: &str, id: &str| match &event[name] {
            Value::Null => format!("#{}", event[id]),
            name => text(name),
        };
        let name = match event["target"].as_str() {
            Some(target) => format!("{target}: {}", name_of("tenant", "tenant_id")),
            None => name_of("bdev", "bdev_id"),
        };
        cells.extend([text(&event["core"]), text(&event["tpoint"]), name]);
        cells.extend(["tag", "op", "lba", "blocks", "status"].map(|key| text(&event[key])));
        cells.push(took.unwrap_or_default());
        table.add_row(cells);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_of_connections_have_target_and_tenant() {
        let event = |tenant: Value| {
            json!({ "tsc": 1000, "core": 0, "tpoint": "TARGET_CONN_LOGIN", "target": "nbd", "flow": 3,
                "tenant": tenant, "tenant_id": 7 })
        };
        let text = table(&json!([event(json!("peer 10.0.0.7")), event(Value::Null)]), 1e9).to_string();
        assert!(text.contains("nbd: peer 10.0.0.7") && text.contains("nbd: #7"), "{text}");
    }

    #[test]
    fn an_io_takes_the_time_from_its_start_to_its_end_on_its_core_and_device() {
        let event = |tsc: u64, point: &str, core: u32, tag: &str| {
            json!({ "tsc": tsc, "core": core, "tpoint": point, "bdev": "N", "bdev_id": 1, "tag": tag, "op": "read",
                "lba": 8, "blocks": 1 })
        };
        let events = json!([
            event(1000, "BDEV_IO_START", 0, "0x1"),
            event(2000, "BDEV_IO_START", 1, "0x1"),
            event(4000, "BDEV_IO_DONE", 0, "0x1"),
            event(4500, "BDEV_IO_DONE", 1, "0x1"),
            event(4600, "BDEV_IO_DONE", 1, "0x2"),
        ]);
        let text = table(&events, 1e9).to_string();
        let words = |line: &str| line.split_whitespace().map(str::to_string).collect::<Vec<_>>();
        let lines: Vec<Vec<String>> = text.lines().map(words).collect();
        assert_eq!(lines[3].first().map(String::as_str), Some("3.000"));
        let last: Vec<&str> = lines[3..].iter().filter_map(|line| line.last()).map(String::as_str).collect();
        assert_eq!(last, ["3.000", "2.500", "1"], "{text}");
    }
}
