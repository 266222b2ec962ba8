//! RPC methods that report the target's configuration and state, and the calls that recreate it.

use std::sync::LazyLock;

use bdev::Uuid;
use control::json::{Value, json};
use control::{Method, RpcError, thread_name, tick_rate};
use wire_nvme::log::AnaState;

use super::authentication::describe_host;
use super::parameters::{AnaStateName, ByNqn, TargetName};
use super::transports;
use crate::module::{NvmfModule, SUBSYSTEM};
use crate::transports::TRANSPORTS;
use crate::{ListenAddress, NvmfTarget, QpairInfo, SubsystemInfo, TargetControllerInfo, TransportStats};

pub(super) fn methods() -> Vec<Method<NvmfModule>> {
    const MISSING: &[(i64, &str)] = &[(RpcError::ENODEV, "there is no such subsystem")];
    vec![
        Method::query("nvmf_get_transports", get_transports)
            .text("Describes the transports.", "array of their parameters")
            .errors(&[(RpcError::ENODEV, "there is no such transport")]),
        Method::query("nvmf_get_subsystems", get_subsystems)
            .text("Describes subsystems.", "array of subsystems with listeners, hosts and namespaces")
            .errors(MISSING),
        Method::query("nvmf_subsystem_get_controllers", get_controllers)
            .text(
                "Describes the controllers of a subsystem.",
                "array of `cntlid`, `cntrltype`, `hostnqn`, `hostid`, `num_io_qpairs`",
            )
            .errors(MISSING),
        Method::query("nvmf_subsystem_get_qpairs", get_qpairs)
            .text(
                "Describes the queue pairs of a subsystem.",
                "array of queue pairs with addresses, reactor and counters",
            )
            .errors(MISSING),
        Method::query("nvmf_subsystem_get_listeners", get_listeners)
            .text("Describes the listeners of a subsystem.", "array of `address`, `ana_state`, `ana_states`")
            .errors(MISSING),
        Method::query("nvmf_get_stats", get_stats)
            .text(&STATS_TEXT, "`tick_rate`, `poll_groups`")
            .errors(SUBSYSTEM),
    ]
}

static STATS_TEXT: LazyLock<String> = LazyLock::new(|| {
    // The newest transport first.
    let counters = TRANSPORTS.iter().rev().map(|kind| kind.counters_text());
    let text = "Queue pairs of each reactor: at present, and since the start. `pending_bdev_io` counts how often a \
                command waited for a buffer.";
    [text].into_iter().chain(counters).collect()
});

/// The calls that recreate the target's present configuration, for `save_config`.
pub(super) fn calls(target: &NvmfTarget) -> Vec<Value> {
    let call = |method: &str, params: Value| json!({ "method": method, "params": params });
    let transports = transports::describe(target).into_iter();
    let mut calls: Vec<Value> = transports.map(|config| call("nvmf_create_transport", config)).collect();
    let referrals = target.referrals();
    calls.extend(referrals.iter().map(|one| call("nvmf_discovery_add_referral", describe_referral(one))));
    let subsystems = target.subsystems();
    let named: Vec<&ListenAddress> =
        subsystems.iter().filter(|one| !one.discovery).flat_map(|one| &one.listeners).collect();
    for one in &subsystems {
        let nqn = &one.nqn;
        // The discovery subsystem listens wherever another subsystem does; only further listeners need a
        // call.
        let own = |address: &&ListenAddress| !one.discovery || !named.contains(address);
        if !one.discovery {
            calls.push(call("nvmf_create_subsystem", subsystem_params(one)));
        }
        for host in &one.hosts {
            let mut params = describe_host("host", host, one.host_keys.get(host));
            params["nqn"] = json!(nqn);
            calls.push(call("nvmf_subsystem_add_host", params));
        }
        for (namespace, info) in namespaces(one).zip(&one.namespaces) {
            calls.push(call("nvmf_subsystem_add_ns", json!({ "nqn": nqn, "namespace": namespace })));
            for host in info.visible_hosts.iter().flatten() {
                let params = json!({ "nqn": nqn, "nsid": info.nsid, "host": host });
                calls.push(call("nvmf_ns_add_host", params));
            }
        }
        for listener in one.listeners.iter().filter(own) {
            let params = json!({ "nqn": nqn, "listen_address": address(listener),
                "secure_channel": one.secure_listeners.contains(listener) });
            calls.push(call("nvmf_subsystem_add_listener", params));
            for (group, state) in target.ana_states(nqn, listener).unwrap_or_default() {
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

fn subsystem_params(subsystem: &SubsystemInfo) -> Value {
    let mut params = json!({
        "nqn": subsystem.nqn,
        "allow_any_host": subsystem.allow_any_host,
        "serial_number": subsystem.serial_number,
        "model_number": subsystem.model_number,
        "max_namespaces": subsystem.max_namespaces,
        "min_cntlid": subsystem.min_cntlid,
        "max_cntlid": subsystem.max_cntlid,
        "ana_reporting": subsystem.ana_reporting,
        "dmrsl": subsystem.dmrsl,
        "wzsl": subsystem.wzsl,
        "enable_nssr": subsystem.enable_nssr,
    });
    if let Some(label) = &subsystem.admin_label {
        params["admin_label"] = json!(label);
    }
    params
}

/// Namespaces as parameters of `nvmf_subsystem_add_ns`.
fn namespaces(subsystem: &SubsystemInfo) -> impl Iterator<Item = Value> + '_ {
    subsystem.namespaces.iter().map(|namespace| {
        let mut params = json!({
            "nsid": namespace.nsid,
            "bdev_name": namespace.bdev_name,
            "nguid": digits(&namespace.nguid),
            "uuid": namespace.uuid,
        });
        if namespace.eui64 != [0; 8] {
            params["eui64"] = json!(digits(&namespace.eui64));
        }
        if let Some(file) = &namespace.ptpl_file {
            params["ptpl_file"] = json!(file);
        }
        if subsystem.ana_reporting {
            params["anagrpid"] = json!(namespace.anagrpid);
        }
        if namespace.visible_hosts.is_some() {
            params["no_auto_visible"] = json!(true);
        }
        if namespace.hide_metadata {
            params["hide_metadata"] = json!(true);
        }
        params
    })
}

fn ana_name(state: AnaState) -> &'static str {
    AnaStateName::from(state).name()
}

fn digits(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02X}")).collect()
}

pub(super) fn address(address: &ListenAddress) -> Value {
    json!({
        "trtype": address.trtype,
        "adrfam": address.adrfam,
        "traddr": address.traddr,
        "trsvcid": address.trsvcid,
    })
}

/// A referral as SPDK describes and saves it.
pub(super) fn describe_referral(referral: &crate::Referral) -> Value {
    json!({
        "address": address(&referral.address),
        "secure_channel": referral.secure_channel,
        "subnqn": referral.subnqn.as_str(),
    })
}

control::parameters! {
    struct GetTransports {
        /// One transport; all without
        trtype: Option<String>,
        tgt_name: TargetName,
    }
}

fn get_transports(module: &NvmfModule, params: GetTransports) -> Result<Vec<Value>, RpcError> {
    let mut all = transports::describe(&params.tgt_name.find(module)?);
    for one in &mut all {
        if let (Value::Object(one), Value::Object(fixed)) = (one, fixed_options()) {
            one.extend(fixed);
        }
    }
    if let Some(wanted) = params.trtype {
        all.retain(|one| one["trtype"].as_str().is_some_and(|name| wanted.eq_ignore_ascii_case(name)));
        if all.is_empty() {
            return Err(RpcError::new(RpcError::ENODEV, format!("transport {wanted} was not created")));
        }
    }
    Ok(all)
}

/// SPDK's options of a transport in which there is no choice here.
fn fixed_options() -> Value {
    json!({
        "iobuf_small_cache_size": 0,
        "iobuf_large_cache_size": 0,
        "zcopy": false,
        "sock_priority": 0,
        "abort_timeout_sec": 0,
        "ack_timeout": 0,
        "data_wr_pool_size": 0,
        "disable_command_passthru": true,
        "kas": nvme_controller::ControllerLimits::default().keep_alive_granularity_ms / 100,
        "min_kato": 0,
    })
}

control::parameters! {
    struct GetSubsystems {
        /// One subsystem; all without
        nqn: Option<String>,
        tgt_name: TargetName,
    }
}

fn get_subsystems(module: &NvmfModule, params: GetSubsystems) -> Result<Vec<Value>, RpcError> {
    let target = params.tgt_name.find(module)?;
    match params.nqn {
        Some(nqn) => Ok(vec![describe(&find(&target, &nqn)?)]),
        None => Ok(target.subsystems().iter().map(describe).collect()),
    }
}

fn find(target: &NvmfTarget, nqn: &str) -> Result<SubsystemInfo, RpcError> {
    let found = target.subsystems().into_iter().find(|subsystem| subsystem.nqn == nqn);
    found.ok_or_else(|| RpcError::new(RpcError::ENODEV, format!("there is no subsystem {nqn}")))
}

fn describe(subsystem: &SubsystemInfo) -> Value {
    let hosts = subsystem.hosts.iter().map(|nqn| describe_host("nqn", nqn, subsystem.host_keys.get(nqn)));
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
        described["dmrsl"] = json!(subsystem.dmrsl);
        described["wzsl"] = json!(subsystem.wzsl);
        if let Some(label) = &subsystem.admin_label {
            described["admin_label"] = json!(label);
        }
        let namespaces = namespaces(subsystem).map(|mut namespace| {
            // SPDK has it in its saved configuration only.
            if let Some(object) = namespace.as_object_mut() {
                object.remove("no_auto_visible");
            }
            // SPDK reports the bdev's name under its older key too.
            namespace["name"] = namespace["bdev_name"].clone();
            namespace
        });
        described["namespaces"] = namespaces.collect();
    }
    described
}

fn get_controllers(module: &NvmfModule, params: ByNqn) -> Result<Vec<Value>, RpcError> {
    let target = params.tgt_name.find(module)?;
    let kind = if find(&target, &params.nqn)?.discovery { "discovery" } else { "io" };
    let controllers = target.controllers(&params.nqn)?;
    let one = |controller: &TargetControllerInfo| {
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

fn get_qpairs(module: &NvmfModule, params: ByNqn) -> Result<Vec<Value>, RpcError> {
    let target = params.tgt_name.find(module)?;
    find(&target, &params.nqn)?;
    let controllers = target.controllers(&params.nqn)?;
    let one = |qpair: &QpairInfo| {
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
    Ok(target.qpairs(&params.nqn)?.iter().map(one).collect())
}

fn get_listeners(module: &NvmfModule, params: ByNqn) -> Result<Vec<Value>, RpcError> {
    let target = params.tgt_name.find(module)?;
    let subsystem = find(&target, &params.nqn)?;
    let one = |listener: &ListenAddress| {
        let states = target.ana_states(&params.nqn, listener).unwrap_or_default();
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

control::parameters! {
    struct GetStats {
        tgt_name: TargetName,
    }
}

fn get_stats(module: &NvmfModule, params: GetStats) -> Result<Value, RpcError> {
    let stats = params.tgt_name.find(module)?.stats()?;
    let transport = |index: usize, transport: &TransportStats| {
        let mut described = json!({ "trtype": transport.trtype });
        for (name, count) in transport.reactors.get(index).into_iter().flatten() {
            described[*name] = json!(count);
        }
        described
    };
    let groups = stats.groups.iter().zip(&stats.totals).enumerate();
    let groups = groups.map(|(index, ((admin, io, unassociated), totals))| {
        json!({
            "name": thread_name(stats.reactors[index]),
            "admin_qpairs": totals.admin_queues,
            "io_qpairs": totals.io_queues,
            "current_admin_qpairs": admin,
            "current_io_qpairs": io,
            "current_unassociated_qpairs": unassociated,
            "pending_bdev_io": totals.buffer_waits,
            "completed_nvme_io": totals.completed_commands,
            "transports": stats.transports.iter().map(|one| transport(index, one)).collect::<Vec<_>>(),
        })
    });
    Ok(json!({ "tick_rate": tick_rate(), "poll_groups": groups.collect::<Vec<_>>() }))
}
