//! Portal groups and initiator groups.

use std::net::{IpAddr, SocketAddr};

use control::json::{Value, json};
use control::{Method, NoParameters, ParameterType, RpcError, TextOrNumber};

use super::auth::add_policy;
use super::{INVALID, IscsiModule, UNRESPONSIVE};
use crate::{InitiatorGroupConfig, IscsiTargetError, Netmask, PortalGroupConfig};

/// iSCSI's port.
const PORT: &str = "3260";

const NO_GROUP: (i64, &str) = (RpcError::ENODEV, "there is no such group");
const EXISTS: (i64, &str) = (RpcError::EEXIST, "there is a group with this tag");

pub(super) fn methods() -> Vec<Method<IscsiModule>> {
    vec![
        Method::update("iscsi_create_portal_group", create_portal_group)
            .text("Listens at addresses, which target nodes refer to by the tag.", "true")
            .assigns(&["portals.port=\"0\""])
            .canonical(canonical_portal_group)
            .errors(&[
                INVALID,
                EXISTS,
                (RpcError::INTERNAL, "an address cannot be listened at, or the target is stopping"),
                UNRESPONSIVE,
            ]),
        Method::update("iscsi_start_portal_group", start_portal_group)
            .text("Listens at the addresses of a portal group that was created with `wait`.", "true")
            .errors(&[
                NO_GROUP,
                (RpcError::INTERNAL, "an address cannot be listened at, or the target is stopping"),
                UNRESPONSIVE,
            ]),
        Method::update("iscsi_delete_portal_group", delete_portal_group)
            .text(
                "Deletes a portal group: its listeners, its connections, and the maps of target nodes that name it.",
                "true",
            )
            .errors(&[NO_GROUP, UNRESPONSIVE]),
        Method::query("iscsi_get_portal_groups", |module: &IscsiModule, _: NoParameters| {
            Ok::<_, RpcError>(module.target.portal_groups().iter().map(describe_portal_group).collect::<Vec<_>>())
        })
        .text("Lists the portal groups.", "array of portal groups with `tag`, `portals` and `private`"),
        Method::update("iscsi_create_initiator_group", create_initiator_group)
            .text("Defines who may log in, which target nodes refer to by the tag.", "true")
            .canonical(canonical_initiator_group)
            .errors(&[INVALID, EXISTS, UNRESPONSIVE]),
        Method::update("iscsi_delete_initiator_group", delete_initiator_group)
            .text(
                "Deletes an initiator group, and the maps of target nodes that name it. Sessions that exist go on.",
                "true",
            )
            .errors(&[NO_GROUP, UNRESPONSIVE]),
        Method::update("iscsi_initiator_group_add_initiators", add_initiators)
            .text("Adds entries to an initiator group.", "true")
            .errors(&[INVALID, NO_GROUP, UNRESPONSIVE]),
        Method::update("iscsi_initiator_group_remove_initiators", remove_initiators)
            .text("Removes entries of an initiator group. Sessions that exist go on.", "true")
            .errors(&[INVALID, NO_GROUP, UNRESPONSIVE]),
        Method::query("iscsi_get_initiator_groups", |module: &IscsiModule, _: NoParameters| {
            let groups = module.target.initiator_groups();
            Ok::<_, RpcError>(groups.iter().map(describe_initiator_group).collect::<Vec<_>>())
        })
        .text("Lists the initiator groups.", "array of initiator groups with `tag`, `initiators` and `netmasks`"),
    ]
}

control::parameters! {
    struct PortalParameters {
        /// IP address; 0.0.0.0 or [::] for all
        host: String,
        /// TCP port
        port: TextOrNumber = TextOrNumber(PORT.to_string()),
    }
}

control::parameters! {
    struct CreatePortalGroup {
        /// Tag, 1 to 65535
        tag: u16,
        /// The addresses
        portals: Vec<PortalParameters>,
        /// Leave it out of discovery
        private: bool = false,
        /// Listen when `iscsi_start_portal_group` is called
        wait: bool = false,
    }
}

control::parameters! {
    struct PortalGroupTag {
        /// Tag of the portal group
        tag: u16,
    }
}

control::parameters! {
    struct InitiatorGroupTag {
        /// Tag of the initiator group
        tag: u32,
    }
}

control::parameters! {
    struct InitiatorEntries {
        /// Tag of the initiator group
        tag: u32,
        /// Names of initiators, or ANY; `!` before a name denies it, and the first that matches decides
        initiators: Vec<String> = Vec::new(),
        /// Addresses as 192.0.2.0/24 or [2001:db8::]/32, or ANY; one has to match
        netmasks: Vec<String> = Vec::new(),
    }
}

/// An address of a host, in brackets for IPv6 or `*` for all, and a port.
pub(super) fn parse_address(
    host_name: &str,
    host: &str,
    port_name: &str,
    port: &str,
) -> Result<SocketAddr, RpcError> {
    let ip = sockets::parse_ip(if ["*", "[*]"].contains(&host) { "0.0.0.0" } else { host })
        .map_err(|_| RpcError::invalid_params(format!("{host_name}: {host} is not an IP address")))?;
    let port = port
        .parse()
        .map_err(|_| RpcError::invalid_params(format!("{port_name}: {port} is not a TCP port")))?;
    Ok(SocketAddr::new(ip, port))
}

impl PortalParameters {
    fn address(&self) -> Result<SocketAddr, RpcError> {
        parse_address("portals: host", &self.host, "portals: port", &self.port.0)
    }

    fn of(address: &SocketAddr) -> PortalParameters {
        let host = match address.ip() {
            IpAddr::V4(ip) => ip.to_string(),
            IpAddr::V6(ip) => format!("[{ip}]"),
        };
        PortalParameters { host, port: TextOrNumber(address.port().to_string()) }
    }
}

fn canonical_portal_group(_: &IscsiModule, params: &mut CreatePortalGroup) -> Result<(), RpcError> {
    for portal in &mut params.portals {
        *portal = PortalParameters::of(&portal.address()?);
    }
    Ok(())
}

/// The order of names decides; that of netmasks does not.
fn canonical_initiator_group(_: &IscsiModule, params: &mut InitiatorEntries) -> Result<(), RpcError> {
    params.initiators = std::mem::take(&mut params.initiators).into_iter().map(any_name).collect();
    params.netmasks = parse_netmasks(&params.netmasks)?.iter().map(ToString::to_string).collect();
    params.netmasks.sort();
    params.netmasks.dedup();
    Ok(())
}

fn create_portal_group(module: &IscsiModule, params: CreatePortalGroup) -> Result<bool, RpcError> {
    let mut portals = Vec::new();
    for portal in params.portals {
        portals.push(portal.address()?);
    }
    if portals.is_empty() {
        return Err(RpcError::invalid_params("portals: expected at least one"));
    }
    let config = PortalGroupConfig {
        private: params.private,
        wait: params.wait,
        ..PortalGroupConfig::new(params.tag, portals)
    };
    module.target.create_portal_group(config)?;
    Ok(true)
}

fn start_portal_group(module: &IscsiModule, params: PortalGroupTag) -> Result<bool, RpcError> {
    module.target.start_portal_group(params.tag)?;
    Ok(true)
}

fn delete_portal_group(module: &IscsiModule, params: PortalGroupTag) -> Result<bool, RpcError> {
    module.target.delete_portal_group(params.tag)?;
    Ok(true)
}

fn parse_netmasks(netmasks: &[String]) -> Result<Vec<Netmask>, IscsiTargetError> {
    let parse =
        |mask: &String| mask.parse().map_err(|error| IscsiTargetError::Invalid(format!("netmasks: {error}")));
    netmasks.iter().map(parse).collect()
}

fn create_initiator_group(module: &IscsiModule, params: InitiatorEntries) -> Result<bool, RpcError> {
    let InitiatorEntries { tag, initiators, netmasks } = params;
    let initiators = initiators.into_iter().map(any_name).collect();
    let netmasks = parse_netmasks(&netmasks)?;
    module.target.create_initiator_group(InitiatorGroupConfig { tag, initiators, netmasks })?;
    Ok(true)
}

fn delete_initiator_group(module: &IscsiModule, params: InitiatorGroupTag) -> Result<bool, RpcError> {
    module.target.delete_initiator_group(params.tag)?;
    Ok(true)
}

fn add_initiators(module: &IscsiModule, params: InitiatorEntries) -> Result<bool, RpcError> {
    let new_masks = parse_netmasks(&params.netmasks)?;
    let new_names: Vec<String> = params.initiators.into_iter().map(any_name).collect();
    module.target.change_initiator_group(params.tag, |initiators, netmasks| {
        initiators.extend(new_names.into_iter().filter(|new| !initiators.contains(new)).collect::<Vec<_>>());
        netmasks.extend(new_masks.into_iter().filter(|new| !netmasks.contains(new)).collect::<Vec<_>>());
        Ok(())
    })?;
    Ok(true)
}

fn remove_initiators(module: &IscsiModule, params: InitiatorEntries) -> Result<bool, RpcError> {
    let old_masks = parse_netmasks(&params.netmasks)?;
    let old_names: Vec<String> = params.initiators.into_iter().map(any_name).collect();
    module.target.change_initiator_group(params.tag, |initiators, netmasks| {
        if let Some(name) = old_names.iter().find(|name| !initiators.contains(name)) {
            return Err(IscsiTargetError::NotFound(format!("initiator {name} in the group")));
        }
        if let Some(mask) = old_masks.iter().find(|mask| !netmasks.contains(mask)) {
            return Err(IscsiTargetError::NotFound(format!("netmask {mask} in the group")));
        }
        initiators.retain(|name| !old_names.contains(name));
        netmasks.retain(|mask| !old_masks.contains(mask));
        Ok(())
    })?;
    Ok(true)
}

/// Older configurations say ALL.
fn any_name(name: String) -> String {
    match name.as_str() {
        "ALL" => "ANY".to_string(),
        "!ALL" => "!ANY".to_string(),
        _ => name,
    }
}

fn describe_portal_group(group: &PortalGroupConfig) -> Value {
    let portal = |address: &SocketAddr| PortalParameters::of(address).encode();
    let portals: Vec<Value> = group.portals.iter().map(portal).collect();
    json!({ "tag": group.tag, "portals": portals, "private": group.private })
}

fn describe_initiator_group(group: &InitiatorGroupConfig) -> Value {
    let netmasks: Vec<String> = group.netmasks.iter().map(ToString::to_string).collect();
    json!({ "tag": group.tag, "initiators": group.initiators, "netmasks": netmasks })
}

pub(super) fn save(module: &IscsiModule) -> Vec<Value> {
    let call = |method: &str, params: Value| json!({ "method": method, "params": params });
    let portal_groups = module.target.portal_groups();
    let initiator_groups = module.target.initiator_groups();
    let portal_calls = portal_groups.iter().flat_map(|group| {
        let mut params = describe_portal_group(group);
        if group.wait {
            params["wait"] = json!(true);
        }
        let auth = group.discovery_auth.map(|policy| {
            let mut params = json!({ "tag": group.tag });
            add_policy(&mut params, policy);
            call("iscsi_portal_group_set_auth", params)
        });
        [call("iscsi_create_portal_group", params)].into_iter().chain(auth)
    });
    let initiator_calls = initiator_groups
        .iter()
        .map(|group| call("iscsi_create_initiator_group", describe_initiator_group(group)));
    portal_calls.chain(initiator_calls).collect()
}
