//! Discovery controllers that multicast DNS finds (NVMe TP 8009): a discovery service for each.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::sync::{Arc, Mutex};

use control::JobHandle;
use mdns::FoundService;
use nvme::{TcpUri, Uri};
use wire_nvme::fabrics::Nqn;

use crate::discovery_service::DiscoveryConfig;
use crate::initiator::{Initiator, InitiatorError};
use crate::path::{PathConfig, TransportId};

/// Discovery controllers that are followed at most, of each search: any host of the network may announce
/// some.
const CONTROLLERS_MAX: usize = 8;

/// Searches by multicast DNS, by name.
#[derive(Clone, Default)]
pub(crate) struct MdnsSearches(Arc<Mutex<BTreeMap<String, MdnsSearch>>>);

struct MdnsSearch {
    service: String,
    found: FoundControllers,
    // Dropping it ends the search.
    discovery: mdns::Discovery,
}

/// Discovery services that a search has started: their names and the addresses of their controllers.
type FoundControllers = Arc<Mutex<Vec<(String, TransportId)>>>;

/// A search, as it is reported.
pub(crate) struct MdnsSearchInfo {
    pub(crate) name: String,
    /// Type of the service that is looked for.
    pub(crate) service: String,
    /// Names of the discovery services that were started, and the addresses of their controllers.
    pub(crate) found: Vec<(String, TransportId)>,
}

impl MdnsSearches {
    /// Starts a search for a type of service such as `_nvme-disc._tcp`. For each discovery controller that is
    /// found a discovery service is started, with the options of `template`, as NAME0_nvme, NAME1_nvme and so
    /// on.
    ///
    /// # Errors
    /// There is a search of this name or for this service, or port 5353 cannot be used.
    pub(crate) fn start(
        &self,
        initiator: &Initiator,
        service: &str,
        template: DiscoveryConfig,
    ) -> Result<(), InitiatorError> {
        let mut searches = sync::lock(&self.0);
        let name = template.name.clone();
        if searches.contains_key(&name) {
            return Err(InitiatorError::Exists(format!("mDNS discovery {name} exists")));
        }
        if searches.values().any(|one| one.discovery.is_for(service)) {
            return Err(InitiatorError::Exists(format!("mDNS discovery for {service} exists")));
        }
        let found = FoundControllers::default();
        let (own_found, own_initiator) = (found.clone(), initiator.clone());
        let addresses = mdns::local_addresses();
        if addresses.iter().all(Ipv4Addr::is_loopback) {
            log::warn!(
                target: "bdev_nvme",
                "{name}: no interface but the loopback has an IPv4 address: stop the search and start it \
                 anew when one has"
            );
        }
        let discovery = mdns::Discovery::start(service, addresses, move |service| {
            follow(&own_initiator, &own_found, &template, &service);
        });
        let discovery = discovery.map_err(|error| match error {
            mdns::MdnsError::Name(_) => InitiatorError::Invalid(format!("svcname: {error}")),
            mdns::MdnsError::System(_) => InitiatorError::Attach(error.to_string()),
        })?;
        let service = service.to_string();
        searches.insert(name, MdnsSearch { service, found, discovery });
        Ok(())
    }

    /// Ends a search, then the discovery services that it has started. If `job` is cancelled, the remaining
    /// ones stay.
    pub(crate) fn stop(
        &self,
        initiator: &Initiator,
        name: &str,
        job: &JobHandle,
    ) -> Result<(), InitiatorError> {
        let search = sync::lock(&self.0).remove(name);
        let MdnsSearch { found, discovery, .. } =
            search.ok_or_else(|| InitiatorError::NotFound(name.to_string()))?;
        drop(discovery);
        let found = std::mem::take(&mut *sync::lock(&found));
        job.set_total(found.len() as u64, "discovery services");
        for (name, _) in found {
            if job.is_cancelled() {
                return Err(InitiatorError::Cancelled);
            }
            // Fails only if it was stopped already.
            let _ = initiator.stop_discovery(&name, &JobHandle::standalone());
            job.advance(1);
        }
        Ok(())
    }

    /// Ends all searches; the discovery services stay.
    pub(crate) fn stop_all(&self) {
        let searches = std::mem::take(&mut *sync::lock(&self.0));
        drop(searches);
    }

    /// The searches, by name.
    pub(crate) fn list(&self) -> Vec<MdnsSearchInfo> {
        let searches = sync::lock(&self.0);
        let one = |(name, search): (&String, &MdnsSearch)| MdnsSearchInfo {
            name: name.clone(),
            service: search.service.clone(),
            found: sync::lock(&search.found).clone(),
        };
        searches.iter().map(one).collect()
    }
}

/// Starts a discovery service for a discovery controller that was found, unless there is one.
fn follow(
    initiator: &Initiator,
    found: &FoundControllers,
    template: &DiscoveryConfig,
    service: &FoundService,
) {
    let name = &template.name;
    let id = match transport_id(service) {
        Ok(id) => id,
        Err(why) => {
            let instance = service.instance.escape_default();
            return log::warn!(target: "bdev_nvme", "{name}: the service '{instance}' is ignored: {why}");
        }
    };
    let mut found = sync::lock(found);
    if found.iter().any(|(_, other)| *other == id) {
        return;
    }
    if found.len() == CONTROLLERS_MAX {
        let address = id.0.controller();
        log::warn!(
            target: "bdev_nvme",
            "{name}: {address} is ignored: {CONTROLLERS_MAX} are followed at most"
        );
        return;
    }
    let service_name = format!("{name}{}_nvme", found.len());
    let discovery = DiscoveryConfig {
        name: service_name.clone(),
        path: PathConfig { id: id.clone(), ..template.path.clone() },
        ..template.clone()
    };
    match initiator.start_discovery(discovery, None) {
        Ok(()) => found.push((service_name, id)),
        Err(error) => log::warn!(target: "bdev_nvme", "{service_name}: {error}"),
    }
}

/// The address of a discovery controller, from the attributes `p` and `nqn` of its service.
fn transport_id(service: &FoundService) -> Result<TransportId, &'static str> {
    if !service.attribute("p").is_some_and(|protocol| protocol.eq_ignore_ascii_case("tcp")) {
        return Err("its protocol is not tcp");
    }
    let nqn = service.attribute("nqn").and_then(|nqn| Nqn::new(nqn).ok());
    let nqn = nqn.ok_or("it has no valid NQN")?;
    let address: Ipv4Addr = service.address;
    if address.is_unspecified() || address.is_broadcast() || address.is_multicast() {
        return Err("its address is not one of a host");
    }
    let host = address.to_string();
    Ok(TransportId(Uri::Tcp(TcpUri { host, port: service.port, ..TcpUri::new(nqn) })))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn service(address: [u8; 4], text: &[&str]) -> FoundService {
        let text = text.iter().map(|text| text.as_bytes().to_vec()).collect();
        FoundService { instance: "one".into(), address: address.into(), port: 8009, text }
    }

    #[test]
    fn an_address_needs_a_protocol_an_nqn_and_a_host() {
        let nqn = "NQN=nqn.2014-08.org.nvmexpress.discovery";
        let id = transport_id(&service([192, 0, 2, 1], &["p=tcp", nqn])).unwrap();
        assert_eq!((id.trtype(), id.traddr().as_str()), ("TCP", "192.0.2.1"));
        assert_eq!(id.subnqn(), Some(wire_nvme::fabrics::DISCOVERY_NQN));
        for (address, text) in [
            ([192, 0, 2, 1], &[nqn][..]),
            ([192, 0, 2, 1], &["p=roce", nqn]),
            ([192, 0, 2, 1], &["p=tcp"]),
            ([192, 0, 2, 1], &["p=tcp", "nqn=x"]),
            ([224, 0, 0, 1], &["p=tcp", nqn]),
            ([0, 0, 0, 0], &["p=tcp", nqn]),
            ([255, 255, 255, 255], &["p=tcp", nqn]),
        ] {
            assert!(transport_id(&service(address, text)).is_err(), "{address:?} {text:?}");
        }
    }
}
