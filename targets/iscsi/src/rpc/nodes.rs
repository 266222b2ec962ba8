//! Target nodes and their logical units.

use std::net::SocketAddr;
use std::path::PathBuf;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bdev::rpc::{STILL_OPEN, conclude};
use bdev::{Closing, PreparedReservations};
use control::json::{Value, json};
use control::{ByName, Method, NoParameters, RpcError, TextOrNumber};
use scsi::AccessState;

use super::auth::{add_policy, policy};
use super::groups::parse_address;
use super::{INVALID, IscsiModule, UNRESPONSIVE};
use crate::{LunConfig, TargetNodeConfig};

const UNUSABLE_FILE: (i64, &str) = (
    RpcError::INTERNAL,
    "a `ptpl_file` is unusable, or is another device's, or the bdev has another one or none",
);
const NO_NODE: (i64, &str) = (RpcError::ENODEV, "there is no such target node");

pub(super) fn methods() -> Vec<Method<IscsiModule>> {
    vec![
        Method::prepared_update("iscsi_create_target_node", prepare_node, create)
            .text("Creates a target that initiators log in to, with bdevs as its logical units.", "true")
            .canonical(canonical_node)
            .errors(&[
                INVALID,
                (RpcError::EEXIST, "the target node exists, or a LUN is given twice"),
                (RpcError::ENODEV, "there is no such bdev, portal group or initiator group"),
                UNUSABLE_FILE,
                UNRESPONSIVE,
            ]),
        Method::concluded_update("iscsi_delete_target_node", delete, conclude)
            .text("Deletes a target node. Its connections complete what is in flight and are closed.", "true")
            .errors(&[NO_NODE, UNRESPONSIVE, STILL_OPEN]),
        Method::query("iscsi_get_target_nodes", |module: &IscsiModule, _: NoParameters| {
            Ok::<_, RpcError>(module.target.nodes().iter().map(describe).collect::<Vec<_>>())
        })
        .text(
            "Lists the target nodes.",
            "array of target nodes, with the parameters of `iscsi_create_target_node`",
        ),
        Method::prepared_update("iscsi_target_node_add_lun", prepare_lun, add_lun)
            .text("Adds a logical unit to a target node; its initiators are told.", "true")
            .errors(&[
                INVALID,
                (RpcError::EEXIST, "the LUN is in use"),
                (RpcError::ENODEV, "there is no such target node or bdev"),
                UNUSABLE_FILE,
                UNRESPONSIVE,
            ]),
        Method::update("iscsi_target_node_add_pg_ig_maps", add_maps)
            .text("Offers a target node through further portal groups, or to further initiators.", "true")
            .errors(&[(RpcError::ENODEV, "there is no such target node or group"), UNRESPONSIVE]),
        Method::update("iscsi_target_node_remove_pg_ig_maps", remove_maps)
            .text("The opposite of `iscsi_target_node_add_pg_ig_maps`. Sessions that exist go on.", "true")
            .errors(&[(RpcError::ENODEV, "there is no such target node or map"), UNRESPONSIVE]),
        Method::update("iscsi_target_node_set_redirect", set_redirect)
            .text(
                "Sends initiators that log in to a target node through a portal group to another address; without an \
                 address, ends that. `iscsi_target_node_request_logout` has those come back that are logged in.",
                "true",
            )
            .canonical(|module: &IscsiModule, params: &mut SetRedirect| {
                params.name = module.target.full_name(&params.name);
                if let Some(to) = params.address()? {
                    params.redirect_host = Some(to.ip().to_string());
                    params.redirect_port = Some(TextOrNumber(to.port().to_string()));
                }
                Ok(())
            })
            .errors(&[
                INVALID,
                (RpcError::ENODEV, "there is no such target node, or it is not offered through the portal group"),
                UNRESPONSIVE,
            ]),
        Method::update("iscsi_target_node_set_access_state", set_access_state)
            .text(
                "Sets the asymmetric access state (ALUA) of a portal group, which is a target port group, for all logical \
                 units of a target node; initiators get a unit attention, and may change it by SET TARGET PORT GROUPS. Not \
                 in SPDK.",
                "true",
            )
            .canonical(|module: &IscsiModule, params: &mut SetAccessState| {
                params.name = module.target.full_name(&params.name);
                Ok(())
            })
            .errors(&[
                INVALID,
                (RpcError::ENODEV, "there is no such target node, or it is not offered through the portal group"),
                UNRESPONSIVE,
            ]),
        Method::update("iscsi_enable_histogram", enable_histogram)
            .text("Begins to count the latencies of a target node's commands, or ends it.", "true")
            .canonical(|module: &IscsiModule, params: &mut EnableHistogram| {
                params.name = module.target.full_name(&params.name);
                Ok(())
            })
            .errors(&[NO_NODE, UNRESPONSIVE]),
        Method::query("iscsi_get_histogram", get_histogram)
            .text(
                "The latencies of a target node's commands since they are counted, on all cores.",
                "`histogram` (base64 of 64-bit counters), `granularity`, `min_range`, `max_range`, `tsc_rate`",
            )
            .errors(&[NO_NODE, (RpcError::INVALID_PARAMS, "the histogram is not enabled")]),
        Method::update("iscsi_target_node_request_logout", request_logout)
            .text("Asks the initiators of a target node to log out, and to come back if they want.", "true")
            .errors(&[NO_NODE, UNRESPONSIVE]),
    ]
}

control::parameters! {
    struct MapParameters {
        /// Tag of a portal group
        pg_tag: u16,
        /// Tag of the initiator group that it admits
        ig_tag: u32,
    }
}

control::parameters! {
    struct LunParameters {
        /// The bdev, by name, alias or UUID
        bdev_name: String,
        /// LUN, 0 to 255
        lun_id: u16 = 0,
        /// File that keeps persistent reservations of the bdev over a power loss (APTPL); not in SPDK
        ptpl_file: Option<String>,
    }
}

control::parameters! {
    struct CreateNode {
        /// An iSCSI name, or what follows `node_base` and a colon in it
        name: String,
        /// A text for humans, which initiators see
        alias_name: String = String::new(),
        /// Through which portal groups which initiators may log in
        pg_ig_maps: Vec<MapParameters>,
        /// The logical units
        luns: Vec<LunParameters>,
        /// Commands of a session in flight, 1 to 256
        queue_depth: u32 = crate::limits::QUEUE_DEPTH_DEFAULT,
        /// Require header digests
        header_digest: bool = false,
        /// Require data digests
        data_digest: bool = false,
        /// No authentication, even if an initiator proposes it
        disable_chap: bool = false,
        /// Initiators have to authenticate
        require_chap: bool = false,
        /// They have to ask the target to authenticate itself; needs `require_chap`
        mutual_chap: bool = false,
        /// Tag of the authentication group; 0 is none
        chap_group: u32 = 0,
    }
}

control::parameters! {
    struct AddLun {
        /// Name of the target node
        name: String,
        /// The bdev, by name, alias or UUID
        bdev_name: String,
        /// LUN; the smallest that is free if left out
        lun_id: Option<u16>,
        /// File that keeps persistent reservations of the bdev over a power loss (APTPL); not in SPDK
        ptpl_file: Option<String>,
    }
}

control::parameters! {
    struct ChangeMaps {
        /// Name of the target node
        name: String,
        /// Portal groups with the initiator groups that they admit
        pg_ig_maps: Vec<MapParameters>,
    }
}

control::parameters! {
    struct SetRedirect {
        /// Name of the target node
        name: String,
        /// Tag of the portal group
        pg_tag: u16,
        /// IP address
        redirect_host: Option<String>,
        /// TCP port
        redirect_port: Option<TextOrNumber>,
    }
}

control::parameters! {
    struct RequestLogout {
        /// Name of the target node
        name: String,
        /// Only connections through this portal group
        pg_tag: Option<u16>,
    }
}

control::parameters! {
    struct SetAccessState {
        /// Name of the target node
        name: String,
        /// Tag of the portal group
        pg_tag: u16,
        /// `optimized`, `non_optimized`, `standby` or `unavailable`
        access_state: String,
    }
}

control::parameters! {
    struct EnableHistogram {
        /// Name of the target node
        name: String,
        /// Begin or end
        enable: bool,
    }
}

/// Access states by name.
const ACCESS_STATES: [(&str, AccessState); 4] = [
    ("optimized", AccessState::Optimized),
    ("non_optimized", AccessState::NonOptimized),
    ("standby", AccessState::Standby),
    ("unavailable", AccessState::Unavailable),
];

/// Time that initiators have to log out.
const LOGOUT_SECONDS: u16 = 60;

fn maps(maps: &[MapParameters]) -> Vec<(u16, u32)> {
    maps.iter().map(|map| (map.pg_tag, map.ig_tag)).collect()
}

/// An empty path is none.
fn path(file: Option<String>) -> Option<PathBuf> {
    file.filter(|file| !file.is_empty()).map(PathBuf::from)
}

fn lun_config(lun: LunParameters) -> LunConfig {
    LunConfig { bdev_name: lun.bdev_name, lun: lun.lun_id, ptpl_file: path(lun.ptpl_file) }
}

/// LUNs and maps in order: that of the call makes no difference.
fn canonical_node(module: &IscsiModule, params: &mut CreateNode) -> Result<(), RpcError> {
    params.name = module.target.full_name(&params.name);
    params.pg_ig_maps.sort_by_key(|map| (map.pg_tag, map.ig_tag));
    params.luns.sort_by_key(|lun| lun.lun_id);
    for lun in &mut params.luns {
        lun.bdev_name = module.target.bdev_name(&lun.bdev_name);
        lun.ptpl_file = lun.ptpl_file.take().filter(|file| !file.is_empty());
    }
    Ok(())
}

type PreparedNode = (TargetNodeConfig, Vec<PreparedReservations>);

/// Opens the files of the reservations, which may block, before other updates have to wait.
fn prepare_node(module: &IscsiModule, params: CreateNode) -> Result<PreparedNode, RpcError> {
    let config = TargetNodeConfig {
        name: params.name,
        alias: params.alias_name,
        maps: maps(&params.pg_ig_maps),
        luns: params.luns.into_iter().map(lun_config).collect(),
        queue_depth: params.queue_depth,
        header_digest: params.header_digest,
        data_digest: params.data_digest,
        auth: policy(params.disable_chap, params.require_chap, params.mutual_chap, params.chap_group),
        redirects: Vec::new(),
        access: Vec::new(),
        histogram: false,
    };
    let reservations = module.target.prepare_units(&config.luns)?;
    Ok((config, reservations))
}

fn create(module: &IscsiModule, (config, reservations): PreparedNode) -> Result<bool, RpcError> {
    module.target.create_node_with(config, reservations)?;
    Ok(true)
}

fn delete(module: &IscsiModule, params: ByName) -> Result<Closing, RpcError> {
    Ok(module.target.delete_node(&params.name)?)
}

/// Name of the target node, LUN, device and file, and the reservations.
type PreparedLun = (String, Option<u16>, LunConfig, Vec<PreparedReservations>);

/// As [`prepare_node`].
fn prepare_lun(module: &IscsiModule, params: AddLun) -> Result<PreparedLun, RpcError> {
    let config = LunConfig { bdev_name: params.bdev_name, lun: 0, ptpl_file: path(params.ptpl_file) };
    let reservations = module.target.prepare_units(std::slice::from_ref(&config))?;
    Ok((params.name, params.lun_id, config, reservations))
}

fn add_lun(module: &IscsiModule, (name, lun, config, reservations): PreparedLun) -> Result<bool, RpcError> {
    module.target.add_lun_with(&name, lun, config, reservations)?;
    Ok(true)
}

fn add_maps(module: &IscsiModule, params: ChangeMaps) -> Result<bool, RpcError> {
    module.target.add_maps(&params.name, &maps(&params.pg_ig_maps))?;
    Ok(true)
}

fn remove_maps(module: &IscsiModule, params: ChangeMaps) -> Result<bool, RpcError> {
    module.target.remove_maps(&params.name, &maps(&params.pg_ig_maps))?;
    Ok(true)
}

impl SetRedirect {
    fn address(&self) -> Result<Option<SocketAddr>, RpcError> {
        match (&self.redirect_host, &self.redirect_port) {
            (Some(host), Some(port)) => {
                parse_address("redirect_host", host, "redirect_port", &port.0).map(Some)
            }
            (None, None) => Ok(None),
            _ => Err(RpcError::invalid_params("redirect_host and redirect_port belong together")),
        }
    }
}

fn set_redirect(module: &IscsiModule, params: SetRedirect) -> Result<bool, RpcError> {
    let to = params.address()?;
    module.target.set_redirect(&params.name, params.pg_tag, to)?;
    Ok(true)
}

fn set_access_state(module: &IscsiModule, params: SetAccessState) -> Result<bool, RpcError> {
    let state = ACCESS_STATES.iter().find(|(name, _)| *name == params.access_state);
    let expected = "access_state: expected optimized, non_optimized, standby or unavailable";
    let (_, state) = state.ok_or_else(|| RpcError::invalid_params(expected))?;
    module.target.set_access_state(&params.name, params.pg_tag, *state)?;
    Ok(true)
}

fn enable_histogram(module: &IscsiModule, params: EnableHistogram) -> Result<bool, RpcError> {
    module.target.enable_histogram(&params.name, params.enable)?;
    Ok(true)
}

fn get_histogram(module: &IscsiModule, params: ByName) -> Result<Value, RpcError> {
    let Some(counts) = module.target.histogram(&params.name)? else {
        let message = format!("{} has no histogram; enable it with iscsi_enable_histogram", params.name);
        return Err(RpcError::invalid_params(message));
    };
    let bytes: Vec<u8> = counts.buckets.iter().flat_map(|count| count.to_le_bytes()).collect();
    Ok(json!({
        "histogram": STANDARD.encode(&bytes),
        "granularity": counts.granularity,
        "min_range": counts.range_min,
        "max_range": counts.range_max,
        "tsc_rate": os::clock::ns_to_ticks(1_000_000_000),
    }))
}

fn request_logout(module: &IscsiModule, params: RequestLogout) -> Result<bool, RpcError> {
    module.target.request_logout(&params.name, params.pg_tag, LOGOUT_SECONDS)?;
    Ok(true)
}

fn describe(node: &TargetNodeConfig) -> Value {
    let map = |(pg_tag, ig_tag): &(u16, u32)| json!({ "pg_tag": pg_tag, "ig_tag": ig_tag });
    let lun = |lun: &LunConfig| {
        let mut described = json!({ "bdev_name": lun.bdev_name, "lun_id": lun.lun });
        if let Some(file) = &lun.ptpl_file {
            described["ptpl_file"] = json!(file);
        }
        described
    };
    let mut params = json!({
        "name": node.name,
        "alias_name": node.alias,
        "pg_ig_maps": node.maps.iter().map(map).collect::<Vec<_>>(),
        "luns": node.luns.iter().map(lun).collect::<Vec<_>>(),
        "queue_depth": node.queue_depth,
        "header_digest": node.header_digest,
        "data_digest": node.data_digest,
    });
    add_policy(&mut params, node.auth);
    params
}

pub(super) fn save(module: &IscsiModule) -> Vec<Value> {
    let nodes = module.target.nodes();
    let calls = nodes.iter().flat_map(|node| {
        let redirect = |(tag, to): &(u16, SocketAddr)| {
            let (host, port) = (to.ip().to_string(), to.port().to_string());
            let params =
                json!({ "name": node.name, "pg_tag": tag, "redirect_host": host, "redirect_port": port });
            json!({ "method": "iscsi_target_node_set_redirect", "params": params })
        };
        let access = |(tag, state): &(u16, AccessState)| {
            let name =
                ACCESS_STATES.iter().find(|(_, one)| one == state).map_or("optimized", |(name, _)| name);
            let params = json!({ "name": node.name, "pg_tag": tag, "access_state": name });
            json!({ "method": "iscsi_target_node_set_access_state", "params": params })
        };
        let create = json!({ "method": "iscsi_create_target_node", "params": describe(node) });
        let histogram = node.histogram.then(
            || json!({ "method": "iscsi_enable_histogram", "params": { "name": node.name, "enable": true } }),
        );
        let changes =
            node.redirects.iter().map(redirect).chain(node.access.iter().map(access)).chain(histogram);
        [create].into_iter().chain(changes.collect::<Vec<_>>())
    });
    calls.collect()
}
