//! Publication of the discovery service by multicast DNS (NVMe TP 8009).

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;

use control::json::{Value, json};
use control::{Method, RpcError};
use mdns::{MdnsService, Publisher};
use wire_nvme::fabrics::DISCOVERY_NQN;

use super::parameters::TargetName;
use crate::NvmfTarget;
use crate::module::NvmfModule;
use crate::published::PublishedTarget;

/// Type of the service (NVMe TP 8009).
const SERVICE: &str = "_nvme-disc._tcp";
/// Addresses that are published at most.
const ADDRESSES_MAX: usize = 32;

pub(super) fn methods() -> Vec<Method<NvmfModule>> {
    vec![
        Method::update("nvmf_publish_mdns_prr", publish)
            .text(
                "Publishes the discovery service of a target on the local network, by multicast DNS over \
                 IPv4: each TCP listener without TLS, and later ones too.",
                "true",
            )
            .errors(&[
                (RpcError::EEXIST, "the target is published"),
                (RpcError::EINVAL, "another target is published"),
                (RpcError::EIO, "port 5353 cannot be used"),
            ]),
        Method::update("nvmf_stop_mdns_prr", stop)
            .text("Withdraws what `nvmf_publish_mdns_prr` has published, if it has.", "true"),
    ]
}

control::parameters! {
    struct PublishMdns {
        tgt_name: TargetName,
    }
}

control::parameters! {
    struct StopMdns {
        tgt_name: TargetName,
    }
}

fn publish(module: &NvmfModule, params: PublishMdns) -> Result<bool, RpcError> {
    let target = params.tgt_name.limited(module)?;
    let mut published = sync::lock(&module.mdns);
    if let Some(published) = &*published {
        return Err(match Arc::ptr_eq(&published.target, &target) {
            true => RpcError::new(RpcError::EEXIST, "the target is published already".to_string()),
            false => RpcError::new(RpcError::EINVAL, "another target is published; one can be".to_string()),
        });
    }
    let addresses = addresses(&target.target);
    let publisher = if addresses.is_empty() { None } else { Some(start(&addresses)?) };
    let params = params.tgt_name.to_member().into_iter().collect();
    *published = Some(PublishedTarget { target, params, addresses, publisher });
    Ok(true)
}

fn stop(module: &NvmfModule, params: StopMdns) -> Result<bool, RpcError> {
    let target = params.tgt_name.limited(module)?;
    sync::lock(&module.mdns).take_if(|published| Arc::ptr_eq(&published.target, &target));
    Ok(true)
}

fn start(addresses: &[(Ipv4Addr, u16)]) -> Result<Publisher, RpcError> {
    let io = |error: mdns::MdnsError| RpcError::new(RpcError::EIO, error.to_string());
    let services: Result<Vec<MdnsService>, _> =
        addresses.iter().map(|(address, port)| service(*address, *port)).collect();
    Publisher::start(services.map_err(io)?).map_err(io)
}

/// The service at an address. The names have the address in them: no other host has it.
fn service(address: Ipv4Addr, port: u16) -> Result<MdnsService, mdns::MdnsError> {
    let [a, b, c, d] = address.octets();
    let host = format!("ringbolt-{a}-{b}-{c}-{d}");
    let nqn = format!("nqn={DISCOVERY_NQN}");
    MdnsService::new(SERVICE, &format!("{host}-{port}"), &host, address, port, &["p=tcp", &nqn])
}

/// The IPv4 addresses at which hosts reach the discovery service over TCP without TLS, in ascending order.
fn addresses(target: &NvmfTarget) -> Vec<(Ipv4Addr, u16)> {
    let subsystems = target.subsystems();
    let discovery = subsystems.iter().filter(|subsystem| subsystem.discovery);
    let mut found = Vec::new();
    for one in discovery {
        for listener in &one.listeners {
            let is_open = listener.trtype == "TCP" && !one.secure_listeners.contains(listener);
            let (Ok(IpAddr::V4(address)), Ok(port)) = (listener.traddr.parse(), listener.trsvcid.parse())
            else {
                continue;
            };
            match address {
                _ if !is_open => {}
                Ipv4Addr::UNSPECIFIED => {
                    found.extend(mdns::local_addresses().into_iter().map(|own| (own, port)))
                }
                address => found.push((address, port)),
            }
        }
    }
    found.sort();
    found.dedup();
    found.truncate(ADDRESSES_MAX);
    found
}

impl NvmfModule {
    /// Publishes the listeners that there are now; withdraws those of a target that was deleted. Called after
    /// listeners have changed.
    pub(super) fn update_mdns(&self) {
        let mut all = sync::lock(&self.mdns);
        let Some(published) = &mut *all else { return };
        if !self.all().iter().any(|(_, target)| Arc::ptr_eq(target, &published.target)) {
            *all = None;
            return;
        }
        let addresses = addresses(&published.target.target);
        if addresses == published.addresses {
            return;
        }
        // Withdrawn first: the names of what stays are the same.
        (published.publisher, published.addresses) = (None, Vec::new());
        if addresses.is_empty() {
            return;
        }
        match start(&addresses) {
            Ok(publisher) => (published.publisher, published.addresses) = (Some(publisher), addresses),
            // The next change of listeners tries it again.
            Err(error) => log::warn!(target: "nvmf", "{}", error.message),
        }
    }

    /// Withdraws what is published.
    pub(super) fn stop_mdns(&self) {
        *sync::lock(&self.mdns) = None;
    }

    /// The call that publishes again what is published.
    pub(super) fn mdns_call(&self) -> Option<Value> {
        let published = sync::lock(&self.mdns);
        let params = &published.as_ref()?.params;
        Some(json!({ "method": "nvmf_publish_mdns_prr", "params": params }))
    }
}
