//! What the target is and does, and the calls that make it again.

use ::nvmf::{ListenAddress, SubsystemInfo, TransportConfig, VfioUserConfig};
use serde::Deserialize;
use serde_json::{Value, json};
use uuid::Uuid;
use wire_nvme::log::AnaState;

use super::{ByNqn, TargetName};
use crate::methods::Table;
use crate::methods::framework::{thread_name, tick_rate};
use crate::rpc::RpcError;
use crate::state::App;

pub(super) fn add(table: &mut Table) {
    table.read("nvmf_get_transports", get_transports);
    table.read("nvmf_get_subsystems", get_subsystems);
    table.read("nvmf_subsystem_get_controllers", get_controllers);
    table.read("nvmf_subsystem_get_qpairs", get_qpairs);
    table.read("nvmf_subsystem_get_listeners", get_listeners);
    table.read("nvmf_get_stats", get_stats);
}

/// The calls that make the target as it is now.
pub(crate) fn calls(app: &App) -> Vec<Value> {
    let call = |method: &str, params: Value| json!({ "method": method, "params": params });
    let mut calls: Vec<Value> =
        transports(app).into_iter().map(|config| call("nvmf_create_transport", config)).collect();
    let subsystems = app.target.subsystems();
    let named: Vec<&ListenAddress> =
        subsystems.iter().filter(|one| !one.discovery).flat_map(|one| &one.listeners).collect();
    for one in &subsystems {
        let nqn = &one.nqn;
        // Discovery is reached wherever a subsystem is; only what is its own needs a call.
        let own = |address: &&ListenAddress| !one.discovery || !named.contains(address);
        if !one.discovery {
            calls.push(call("nvmf_create_subsystem", subsystem_params(one)));
        }
        for host in &one.hosts {
            calls.push(call("nvmf_subsystem_add_host", json!({ "nqn": nqn, "host": host })));
        }
        for namespace in namespaces(one) {
            calls.push(call("nvmf_subsystem_add_ns", json!({ "nqn": nqn, "namespace": namespace })));
        }
        for listener in one.listeners.iter().filter(own) {
            let params = json!({ "nqn": nqn, "listen_address": address(listener), "secure_channel": false });
            calls.push(call("nvmf_subsystem_add_listener", params));
            for (group, state) in app.target.ana_states(nqn, listener).unwrap_or_default() {
                if state != AnaState::Optimized {
                    let params = json!({ "nqn": nqn, "listen_address": address(listener),
                        "ana_state": ana_name(state), "anagrpid": group });
                    calls.push(call("nvmf_subsystem_listener_set_ana_state", params));
                }
            }
        }
    }
    calls
}

fn transport(config: &TransportConfig) -> Value {
    json!({
        "trtype": "TCP",
        "max_queue_depth": config.max_queue_depth,
        "max_io_qpairs_per_ctrlr": config.max_io_qpairs_per_ctrlr,
        "in_capsule_data_size": config.in_capsule_data_size,
        "max_io_size": config.max_io_size,
        "max_aq_depth": config.max_aq_depth,
        "c2h_success": config.c2h_success,
    })
}

fn vfio_user(config: &VfioUserConfig) -> Value {
    json!({
        "trtype": "VFIOUSER",
        "max_queue_depth": config.max_queue_depth,
        "max_io_qpairs_per_ctrlr": config.max_io_qpairs_per_ctrlr,
        "max_io_size": config.max_io_size,
        "disable_mappable_bar0": config.disable_mappable_bar0,
    })
}

/// Every transport, as it was made.
fn transports(app: &App) -> Vec<Value> {
    let tcp = app.target.transports();
    tcp.iter().map(transport).chain(app.target.vfio_user().iter().map(vfio_user)).collect()
}

fn subsystem_params(subsystem: &SubsystemInfo) -> Value {
    json!({
        "nqn": subsystem.nqn,
        "allow_any_host": subsystem.allow_any_host,
        "serial_number": subsystem.serial_number,
        "model_number": subsystem.model_number,
        "max_namespaces": subsystem.max_namespaces,
        "min_cntlid": subsystem.min_cntlid,
        "max_cntlid": subsystem.max_cntlid,
        "ana_reporting": subsystem.ana_reporting,
    })
}

/// As `nvmf_subsystem_add_ns` takes them.
fn namespaces(subsystem: &SubsystemInfo) -> impl Iterator<Item = Value> + '_ {
    subsystem.namespaces.iter().map(|namespace| {
        let mut described = json!({
            "nsid": namespace.nsid,
            "bdev_name": namespace.bdev_name,
            "nguid": digits(&namespace.nguid),
            "uuid": namespace.uuid,
        });
        if namespace.eui64 != [0; 8] {
            described["eui64"] = json!(digits(&namespace.eui64));
        }
        if let Some(file) = &namespace.ptpl_file {
            described["ptpl_file"] = json!(file);
        }
        if subsystem.ana_reporting {
            described["anagrpid"] = json!(namespace.anagrpid);
        }
        described
    })
}

fn ana_name(state: AnaState) -> &'static str {
    super::ANA_STATES.iter().find(|(_, known)| *known == state).map_or("optimized", |(name, _)| name)
}

fn digits(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02X}")).collect()
}

fn address(address: &ListenAddress) -> Value {
    json!({
        "trtype": address.trtype,
        "adrfam": address.adrfam,
        "traddr": address.traddr,
        "trsvcid": address.trsvcid,
    })
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct GetTransports {
    trtype: Option<String>,
    #[serde(default)]
    tgt_name: TargetName,
}

fn get_transports(app: &App, params: GetTransports) -> Result<Vec<Value>, RpcError> {
    params.tgt_name.check()?;
    let mut all = transports(app);
    if let Some(wanted) = params.trtype {
        all.retain(|one| one["trtype"].as_str().is_some_and(|name| wanted.eq_ignore_ascii_case(name)));
        if all.is_empty() {
            return Err(RpcError::new(RpcError::ENODEV, format!("transport {wanted} was not created")));
        }
    }
    Ok(all)
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct GetSubsystems {
    nqn: Option<String>,
    #[serde(default)]
    tgt_name: TargetName,
}

fn get_subsystems(app: &App, params: GetSubsystems) -> Result<Vec<Value>, RpcError> {
    params.tgt_name.check()?;
    match params.nqn {
        Some(nqn) => Ok(vec![describe(&find(app, &nqn)?)]),
        None => Ok(app.target.subsystems().iter().map(describe).collect()),
    }
}

fn find(app: &App, nqn: &str) -> Result<SubsystemInfo, RpcError> {
    let found = app.target.subsystems().into_iter().find(|subsystem| subsystem.nqn == nqn);
    found.ok_or_else(|| RpcError::new(RpcError::ENODEV, format!("there is no subsystem {nqn}")))
}

fn describe(subsystem: &SubsystemInfo) -> Value {
    let hosts = subsystem.hosts.iter().map(|nqn| json!({ "nqn": nqn }));
    let mut described = json!({
        "nqn": subsystem.nqn,
        "subtype": if subsystem.discovery { "Discovery" } else { "NVMe" },
        "listen_addresses": subsystem.listeners.iter().map(address).collect::<Vec<_>>(),
        "allow_any_host": subsystem.allow_any_host,
        "hosts": hosts.collect::<Vec<_>>(),
    });
    if !subsystem.discovery {
        described["serial_number"] = json!(subsystem.serial_number);
        described["model_number"] = json!(subsystem.model_number);
        described["max_namespaces"] = json!(subsystem.max_namespaces);
        described["passthrough"] = json!(false);
        described["min_cntlid"] = json!(subsystem.min_cntlid);
        described["max_cntlid"] = json!(subsystem.max_cntlid);
        described["dmrsl"] = json!(0);
        described["wzsl"] = json!(0);
        let namespaces = namespaces(subsystem).map(|mut namespace| {
            // SPDK still tells the device's name by its old name, too.
            namespace["name"] = namespace["bdev_name"].clone();
            namespace
        });
        described["namespaces"] = namespaces.collect();
    }
    described
}

fn get_controllers(app: &App, params: ByNqn) -> Result<Vec<Value>, RpcError> {
    params.tgt_name.check()?;
    let kind = if find(app, &params.nqn)?.discovery { "discovery" } else { "io" };
    let controllers = app.target.controllers(&params.nqn)?;
    let one = |controller: &::nvmf::ControllerInfo| {
        json!({
            "cntlid": controller.cntlid,
            "cntrltype": kind,
            "hostnqn": controller.hostnqn,
            "hostid": Uuid::from_bytes(controller.hostid),
            "num_io_qpairs": controller.num_io_qpairs,
        })
    };
    Ok(controllers.iter().map(one).collect())
}

fn get_qpairs(app: &App, params: ByNqn) -> Result<Vec<Value>, RpcError> {
    params.tgt_name.check()?;
    find(app, &params.nqn)?;
    let controllers = app.target.controllers(&params.nqn)?;
    let one = |qpair: &::nvmf::QpairInfo| {
        let controller = controllers.iter().find(|controller| controller.cntlid == qpair.cntlid);
        json!({
            "cntlid": qpair.cntlid,
            "qid": qpair.qid,
            "state": "enabled",
            "thread": thread_name(qpair.reactor),
            "hostnqn": controller.map_or("", |controller| controller.hostnqn.as_str()),
            "listen_address": address(&qpair.local),
            "peer_address": address(&qpair.peer),
            "queue_depth": qpair.queue_depth,
            "commands": qpair.commands,
            "errors": qpair.errors,
        })
    };
    Ok(app.target.qpairs(&params.nqn)?.iter().map(one).collect())
}

fn get_listeners(app: &App, params: ByNqn) -> Result<Vec<Value>, RpcError> {
    params.tgt_name.check()?;
    let subsystem = find(app, &params.nqn)?;
    let one = |listener: &ListenAddress| {
        let states = app.target.ana_states(&params.nqn, listener).unwrap_or_default();
        let first = states.first().map_or("optimized", |(_, state)| ana_name(*state));
        let mut described = json!({ "address": address(listener), "ana_state": first });
        if subsystem.ana_reporting {
            let group = |(group, state): &(u32, AnaState)| json!({ "ana_group": group, "ana_state": ana_name(*state) });
            described["ana_states"] = states.iter().map(group).collect();
        }
        described
    };
    Ok(subsystem.listeners.iter().map(one).collect())
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct GetStats {
    #[serde(default)]
    tgt_name: TargetName,
}

fn get_stats(app: &App, params: GetStats) -> Result<Value, RpcError> {
    params.tgt_name.check()?;
    let stats = app.target.stats()?;
    let transports: Vec<Value> =
        transports(app).iter().map(|one| json!({ "trtype": one["trtype"] })).collect();
    let groups = stats.groups.iter().enumerate().map(|(index, (admin, io, unassociated))| {
        json!({
            "name": thread_name(index),
            "current_admin_qpairs": admin,
            "current_io_qpairs": io,
            "current_unassociated_qpairs": unassociated,
            "transports": transports,
        })
    });
    Ok(json!({ "tick_rate": tick_rate(), "poll_groups": groups.collect::<Vec<_>>() }))
}
