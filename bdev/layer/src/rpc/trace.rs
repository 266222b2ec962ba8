//! RPC methods of the trace: SPDK's `trace_*`, and `trace_get_events`, which reads it.

use std::collections::HashMap;

use control::json::{Value, json};
use control::{Method, NoParameters, RpcError, tick_rate};

use super::BdevModule;
use crate::{TenantId, TraceEvent, TraceGroup, TracePoint};

/// Names all groups.
const ALL: &str = "all";
/// Most events in a result: about 2 MiB of JSON.
const EVENTS_MAX: u32 = 10_000;

pub(super) fn methods() -> Vec<Method<BdevModule>> {
    const UNKNOWN: &[(i64, &str)] = &[(RpcError::INVALID_PARAMS, "there is no such group")];
    vec![
        Method::update("trace_enable_tpoint_group", |bdevs: &BdevModule, params: Group| {
            set_masks(bdevs, &params.selected(true)?, |_| u64::MAX)
        })
        .at_any_stage()
        .text("Enables all trace points of a group.", "true")
        .errors(UNKNOWN),
        Method::update("trace_disable_tpoint_group", |bdevs: &BdevModule, params: Group| {
            set_masks(bdevs, &params.selected(true)?, |_| 0)
        })
        .at_any_stage()
        .text("Disables all trace points of a group. What they recorded is kept.", "true")
        .errors(UNKNOWN),
        Method::update("trace_set_tpoint_mask", |bdevs: &BdevModule, params: Points| {
            set_masks(bdevs, &params.group().selected(false)?, |mask| mask | params.tpoint_mask)
        })
        .at_any_stage()
        .text("Enables trace points of a group.", "true")
        .errors(UNKNOWN),
        Method::update("trace_clear_tpoint_mask", |bdevs: &BdevModule, params: Points| {
            set_masks(bdevs, &params.group().selected(false)?, |mask| mask & !params.tpoint_mask)
        })
        .at_any_stage()
        .text("Disables trace points of a group.", "true")
        .errors(UNKNOWN),
        Method::update("trace_clear", |bdevs: &BdevModule, _: NoParameters| {
            bdevs.registry.clear_trace();
            Ok(true)
        })
        .text("Forgets what was recorded. Enabled trace points go on recording.", "true"),
        Method::query("trace_get_tpoint_group_mask", get_group_mask).at_any_stage().text(
            "Reports the groups with an enabled trace point.",
            "`tpoint_group_mask`, and `enabled`, `mask`, `tpoint_mask` and `tpoints` (`name`, `tpoint_id`, `enabled`) of \
                each group by name",
        ),
        Method::query("trace_get_info", get_info).at_any_stage().text(
            "Reports the enabled trace points.",
            "`tpoint_shm_path` (empty: `trace_get_events` reads the trace), `tpoint_group_mask`, and `mask` and \
                `tpoint_mask` of each group by name",
        ),
        Method::query("trace_get_events", get_events).at_any_stage().text(
            "The last events of enabled trace points, the oldest first. Each core keeps 8,191.",
            "`tick_rate`, `events`: array of `tsc`, `core`, `tpoint`, `bdev` (null if it was deleted), `bdev_id`; of I/O \
                also `tag`, `op`, `lba`, `blocks`; at `BDEV_IO_DONE` also `status`. Of connections `tsc`, `core`, `tpoint`, \
                `target`, `flow`, `tenant` (null if it has no connections any more), `tenant_id`",
        ),
    ]
}

control::parameters! {
    struct Group {
        /// `bdev`, `target`, or `all` for all groups
        name: String,
    }
}

control::parameters! {
    struct Points {
        /// `bdev` or `target`
        name: String,
        /// A bit for each. Of `bdev`: 1 `BDEV_IO_START`, 2 `BDEV_IO_DONE`, 4 `BDEV_IOCH_CREATE`, 8
        /// `BDEV_IOCH_DESTROY`, 16 `BDEV_IO_RETURNED` (it stays with its sender, whose queue is full). Of
        /// `target`: 1 `TARGET_CONN_ACCEPT`, 2 `TARGET_CONN_LOGIN`, 4 `TARGET_CONN_CLOSE`. Others have no
        /// effect
        tpoint_mask: u64,
    }
}

control::parameters! {
    struct GetEvents {
        /// How many at most; no call returns more than 10,000
        count: u32 = 1000,
        /// Index of a core; absent for all
        core: Option<u32>,
    }
}

impl Group {
    fn selected(&self, all: bool) -> Result<Vec<TraceGroup>, RpcError> {
        let is_named = |group: &TraceGroup| self.name == group.name() || (all && self.name == ALL);
        let groups: Vec<TraceGroup> = TraceGroup::ALL.into_iter().filter(is_named).collect();
        if groups.is_empty() {
            let known = TraceGroup::ALL.map(TraceGroup::name).join(" and ");
            return Err(RpcError::invalid_params(format!(
                "name: there is no group {}; there are {known}",
                self.name
            )));
        }
        Ok(groups)
    }
}

impl Points {
    fn group(&self) -> Group {
        Group { name: self.name.clone() }
    }
}

fn set_masks(
    bdevs: &BdevModule,
    groups: &[TraceGroup],
    change: impl Fn(u64) -> u64,
) -> Result<bool, RpcError> {
    for group in groups {
        bdevs.registry.set_trace_mask(*group, change(bdevs.registry.trace_mask(*group)));
    }
    Ok(true)
}

fn hex(value: u64) -> String {
    format!("{value:#x}")
}

fn enabled_groups(bdevs: &BdevModule) -> u64 {
    let enabled = TraceGroup::ALL.into_iter().filter(|group| bdevs.registry.trace_mask(*group) != 0);
    enabled.fold(0, |bits, group| bits | group.bit())
}

fn get_group_mask(bdevs: &BdevModule, _: NoParameters) -> Result<Value, RpcError> {
    let mut masks = json!({ "tpoint_group_mask": hex(enabled_groups(bdevs)) });
    for group in TraceGroup::ALL {
        let mask = bdevs.registry.trace_mask(group);
        let points = group.points().map(|point| {
            let id = point.number();
            json!({ "name": point.name(), "tpoint_id": id, "enabled": (mask >> id) & 1 != 0 })
        });
        masks[group.name()] = json!({
            "enabled": mask != 0,
            "mask": hex(group.bit()),
            "tpoint_mask": hex(mask),
            "tpoints": points.collect::<Vec<_>>(),
        });
    }
    Ok(masks)
}

fn get_info(bdevs: &BdevModule, _: NoParameters) -> Result<Value, RpcError> {
    let mut info = json!({ "tpoint_shm_path": "", "tpoint_group_mask": hex(enabled_groups(bdevs)) });
    for group in TraceGroup::ALL {
        let mask = bdevs.registry.trace_mask(group);
        info[group.name()] = json!({ "mask": hex(group.bit()), "tpoint_mask": hex(mask) });
    }
    Ok(info)
}

fn get_events(bdevs: &BdevModule, params: GetEvents) -> Result<Value, RpcError> {
    let count = params.count.min(EVENTS_MAX) as usize;
    let events = bdevs.registry.trace_events(params.core.map(|core| core as usize), count);
    let devices = bdevs.registry.list();
    let names = devices.iter().map(|device| (device.trace_id(), device.name()));
    let names: HashMap<u32, &str> = names.collect();
    let tenants = bdevs.registry.tenants().list().into_iter();
    let tenants: HashMap<TenantId, String> = tenants.map(|tenant| (tenant.id, tenant.name)).collect();
    let describe = |event: &TraceEvent| match &event.connection {
        Some(connection) => json!({
            "tsc": event.ticks,
            "core": event.core,
            "tpoint": event.point.name(),
            "target": connection.target,
            "flow": connection.flow,
            "tenant": tenants.get(&connection.tenant),
            "tenant_id": connection.tenant.index(),
        }),
        None => describe(event, &names),
    };
    let events: Vec<Value> = events.iter().map(describe).collect();
    Ok(json!({ "tick_rate": tick_rate(), "events": events }))
}

fn describe(event: &TraceEvent, names: &HashMap<u32, &str>) -> Value {
    let mut described = json!({
        "tsc": event.ticks,
        "core": event.core,
        "tpoint": event.point.name(),
        "bdev": names.get(&event.device),
        "bdev_id": event.device,
    });
    if let Some(io) = &event.io {
        described["tag"] = json!(hex(io.tag));
        described["op"] = json!(io.op.name());
        described["lba"] = json!(io.lba);
        described["blocks"] = json!(io.blocks);
        if event.point == TracePoint::IoDone {
            described["status"] = json!(io.status.to_string());
        }
    }
    described
}
