//! Methods of discovery by multicast DNS.

use control::json::{Value, json};
use control::{ByName, JobHandle, Method, NoParameters, RpcError};

use super::attach::HostNqn;
use super::module::{NvmeModule, trid};
use super::options::reconnect_policy;
use crate::{DiscoveryConfig, InitiatorError, PathConfig, TransportId};

pub(super) fn methods() -> Vec<Method<NvmeModule>> {
    vec![
        Method::update("bdev_nvme_start_mdns_discovery", start)
            .text(
                "Looks for discovery controllers on the local network, by multicast DNS over IPv4, and \
                 starts a discovery service for each that it finds, at most 8.",
                "true",
            )
            .errors(&[
                (RpcError::EEXIST, "there is one of this name or for this service"),
                (RpcError::EINVAL, "svcname is not a name"),
                (RpcError::EIO, "port 5353 cannot be used"),
            ]),
        Method::job("bdev_nvme_stop_mdns_discovery", stop)
            .text(
                "Ends it, and the discovery services that it started. Cancelled, it leaves the rest.",
                "true",
            )
            .errors(&[(RpcError::ENODEV, "there is no such one")]),
        Method::query("bdev_nvme_get_mdns_discovery_info", get_info).text(
            "Describes discovery by multicast DNS.",
            "array of `name`, `svcname`, `referrals` of `name`, `trid`",
        ),
    ]
}

control::parameters! {
    struct StartMdnsDiscovery {
        /// Name; the discovery services are called NAME0_nvme, NAME1_nvme, …
        name: String,
        /// Type of the service, such as `_nvme-disc._tcp`
        svcname: String,
        /// Host; without, the driver's
        hostnqn: Option<HostNqn>,
    }
}

fn start(module: &NvmeModule, params: StartMdnsDiscovery) -> Result<bool, RpcError> {
    let options = module.options().clone();
    let loss_timeouts = options.complete(&mut None, &mut None, &mut None);
    // Each discovery service has the address of its controller.
    let uri = nvme::TcpUri::new(wire_nvme::fabrics::Nqn::discovery());
    let mut path = PathConfig::new(TransportId(nvme::Uri::Tcp(uri)));
    path.options = options.driver_options();
    path.count_io = options.io_path_stat;
    path.options.hostnqn = params.hostnqn.as_ref().and_then(HostNqn::nqn);
    path.reconnect = reconnect_policy(loss_timeouts)?;
    let template = DiscoveryConfig {
        name: params.name.clone(),
        path,
        retries_max: options.retries_max(),
        policy: options.policy,
    };
    let place = module.saved.mdns.reserve();
    let started = module.mdns.start(&module.initiator, &params.svcname, template);
    started.map_err(|error| match error {
        InitiatorError::Exists(message) => RpcError::new(RpcError::EEXIST, message),
        other => other.into(),
    })?;
    module.saved.mdns.record_at(place, &params.name, "bdev_nvme_start_mdns_discovery", &params);
    Ok(true)
}

fn stop(module: &NvmeModule, params: ByName, job: &JobHandle) -> Result<bool, RpcError> {
    module.mdns.stop(&module.initiator, &params.name, job)?;
    Ok(true)
}

fn get_info(module: &NvmeModule, _: NoParameters) -> Result<Vec<Value>, RpcError> {
    let searches = module.mdns.list().into_iter();
    let all = searches.map(|search| {
        let found = search.found.iter().map(|(name, id)| json!({ "name": name, "trid": trid(id) }));
        let referrals: Vec<Value> = found.collect();
        json!({ "name": search.name, "svcname": search.service, "referrals": referrals })
    });
    Ok(all.collect())
}
