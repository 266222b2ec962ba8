//! `bdev_nvme_set_options`: defaults for controllers attached later, and the multipath policy in SPDK's
//! terms.

use control::{Method, RpcError};

use nvme_auth::{AuthKeys, AuthOptions};

use super::module::NvmeModule;
use crate::{Policy, ReconnectPolicy, Selector};

pub(super) fn methods() -> Vec<Method<NvmeModule>> {
    vec![
        Method::update("bdev_nvme_set_options", set_options)
            .at_any_stage()
            .text("Sets defaults for controllers attached later. What is absent stays as it is.", "true")
            .assigns(&[
                "action_on_timeout",
                "timeout_us",
                "timeout_admin_us",
                "keep_alive_timeout_ms",
                "bdev_retry_count",
                "io_queue_requests",
                "ctrlr_loss_timeout_sec",
                "reconnect_delay_sec",
                "fast_io_fail_timeout_sec",
                "multipath_opts",
                "io_path_stat",
            ])
            .canonical(canonical_options)
            .errors(&[
                (RpcError::EPERM, "a controller is attached already"),
                (RpcError::EINVAL, "the time-outs contradict each other"),
            ]),
    ]
}

/// Largest `transport_ack_timeout`: 24 days.
const TRANSPORT_ACK_TIMEOUT_MAX: u8 = 31;

/// `ctrlr_loss_timeout_sec`, `reconnect_delay_sec` and `fast_io_fail_timeout_sec`.
pub(super) type LossTimeouts = (i32, u32, u32);

/// Options of `bdev_nvme_set_options`: defaults for controllers attached later.
#[derive(Clone, Debug)]
pub(super) struct NvmeOptions {
    keep_alive_timeout_ms: u32,
    timeout_us: u64,
    timeout_admin_us: u64,
    bdev_retry_count: i32,
    io_queue_requests: u32,
    /// log2 of milliseconds; 0 is none.
    transport_ack_timeout: u8,
    tcp_connect_timeout_ms: u32,
    transport_tos: u8,
    pub(super) loss_timeouts: LossTimeouts,
    pub(super) policy: Policy,
    pub(super) io_path_stat: bool,
    quiesce_wait: bool,
    map_lent_memory: bool,
    /// What hosts authenticate with.
    authentication: AuthOptions,
}

impl Default for NvmeOptions {
    fn default() -> Self {
        NvmeOptions {
            keep_alive_timeout_ms: 10_000,
            timeout_us: 0,
            timeout_admin_us: 0,
            bdev_retry_count: 3,
            io_queue_requests: 0,
            transport_ack_timeout: 0,
            tcp_connect_timeout_ms: 0,
            transport_tos: 0,
            loss_timeouts: (0, 0, 0),
            policy: Policy::ActivePassive,
            io_path_stat: false,
            quiesce_wait: true,
            map_lent_memory: true,
            authentication: AuthOptions::default(),
        }
    }
}

impl NvmeOptions {
    /// Completes the time-outs that a call gives.
    pub(super) fn complete(
        &self,
        loss: &mut Option<i32>,
        delay: &mut Option<u32>,
        fast_fail: &mut Option<u32>,
    ) -> LossTimeouts {
        let default = self.loss_timeouts;
        (*loss.get_or_insert(default.0), *delay.get_or_insert(default.1), *fast_fail.get_or_insert(default.2))
    }

    pub(super) fn retries_max(&self) -> u16 {
        // -1 means unlimited in SPDK; here the number of retries is bounded.
        u16::try_from(self.bdev_retry_count).unwrap_or(u16::MAX)
    }

    /// How a host with these keys authenticates.
    pub(super) fn credentials(&self, keys: Option<AuthKeys>) -> nvme::HostCredentials {
        nvme::HostCredentials::new(keys, self.authentication.clone())
    }

    pub(super) fn driver_options(&self) -> nvme::Options {
        let default = nvme::Options::default();
        let ns = |us: u64, or: u64| if us == 0 { or } else { us.saturating_mul(1000) };
        nvme::Options {
            keep_alive_ms: self.keep_alive_timeout_ms,
            queue_depth: match self.io_queue_requests {
                0 => default.queue_depth,
                requests => requests.clamp(1, 1023),
            },
            timeout_ns: ns(self.timeout_admin_us, default.timeout_ns),
            io_timeout_ns: ns(self.timeout_us, 0),
            ack_timeout_ms: match self.transport_ack_timeout {
                0 => 0,
                // The kernel takes a signed number.
                log2 => 1u32.checked_shl(log2.into()).unwrap_or(u32::MAX).min(i32::MAX as u32),
            },
            connect_timeout_ns: u64::from(self.tcp_connect_timeout_ms) * 1_000_000,
            type_of_service: self.transport_tos,
            quiesce_wait: self.quiesce_wait,
            map_lent_memory: self.map_lent_memory,
            ..default
        }
    }
}

control::choices! {
    /// `policy` of SPDK's methods.
    pub(super) enum PolicyName {
        ActivePassive = "active_passive",
        ActiveActive = "active_active",
    }
}

control::choices! {
    /// `selector` of SPDK's methods.
    pub(super) enum SelectorName {
        RoundRobin = "round_robin",
        QueueDepth = "queue_depth",
    }
}

control::parameters! {
    /// `multipath_opts` of SPDK's methods.
    pub(super) struct MultipathOpts {
        /// Policy; without, active_passive
        policy: Option<PolicyName>,
        /// How active_active selects; without, round_robin
        selector: Option<SelectorName>,
        /// I/Os on a path before the next, for round_robin; without, 1
        min_io: Option<u32>,
    }
}

pub(super) fn policy(
    policy: Option<PolicyName>,
    selector: Option<SelectorName>,
    min_io: Option<u32>,
) -> Result<Policy, RpcError> {
    if policy != Some(PolicyName::ActiveActive) {
        if selector.is_some() || min_io.is_some() {
            let message = "selector and min_io require the policy active_active";
            return Err(RpcError::invalid_params(message));
        }
        return Ok(Policy::ActivePassive);
    }
    match (selector, min_io) {
        (_, Some(0)) => Err(RpcError::invalid_params("min_io must be at least 1")),
        (Some(SelectorName::QueueDepth), Some(_)) => {
            Err(RpcError::invalid_params("min_io requires the selector round_robin"))
        }
        (Some(SelectorName::QueueDepth), None) => Ok(Policy::ActiveActive(Selector::QueueDepth)),
        (_, min_io) => {
            let min_io = min_io.unwrap_or(1);
            Ok(Policy::ActiveActive(Selector::RoundRobin { min_io }))
        }
    }
}

impl MultipathOpts {
    pub(super) fn policy(&self) -> Result<Policy, RpcError> {
        policy(self.policy, self.selector, self.min_io)
    }

    /// The parameters of a policy, for the saved call.
    pub(super) fn of(policy: Policy) -> MultipathOpts {
        let (policy, selector, min_io) = match policy {
            Policy::ActivePassive => (PolicyName::ActivePassive, None, None),
            Policy::ActiveActive(Selector::QueueDepth) => {
                (PolicyName::ActiveActive, Some(SelectorName::QueueDepth), None)
            }
            Policy::ActiveActive(Selector::RoundRobin { min_io }) => {
                (PolicyName::ActiveActive, Some(SelectorName::RoundRobin), Some(min_io))
            }
        };
        MultipathOpts { policy: Some(policy), selector, min_io }
    }
}

control::choices! {
    enum TimeoutAction {
        None = "none",
        Abort = "abort",
        Reset = "reset",
    }
}

control::parameters! {
    struct SetOptions {
        /// What happens to an I/O that takes longer than `timeout_us`: abort and reset are the same
        action_on_timeout: Option<TimeoutAction>,
        /// Time-out of I/O; 0 is none
        timeout_us: Option<u64> ["us"],
        /// Time-out of admin commands; 0 is the driver's
        timeout_admin_us: Option<u64> ["us"],
        /// Keep-alive time-out
        keep_alive_timeout_ms: Option<u32> ["ms"],
        /// Retries of an I/O; -1 is the maximum of 65535
        bdev_retry_count: Option<i32>,
        /// Requests of an I/O queue; 0 is the driver's default
        io_queue_requests: Option<u32>,
        /// How long a peer may not acknowledge what was sent over TCP, as a power of two of milliseconds, 31
        /// at most; 0 is the kernel's time, of many minutes
        transport_ack_timeout: Option<u8>,
        /// How long a connection over TCP may take until the controller has answered its first message; 0 is
        /// the time-out of admin commands
        tcp_connect_timeout_ms: Option<u32> ["ms"],
        /// Type of service of packets over TCP, or their traffic class
        transport_tos: Option<u8>,
        /// When a lost controller is given up; -1 is never, 0 at once
        ctrlr_loss_timeout_sec: Option<i32> ["s"],
        /// Time between attempts to reconnect
        reconnect_delay_sec: Option<u32> ["s"],
        /// When I/O of a lost controller fails
        fast_io_fail_timeout_sec: Option<u32> ["s"],
        /// Multipath policy
        multipath_opts: Option<MultipathOpts>,
        /// Count I/O of each path
        io_path_stat: Option<bool>,
        /// Whether a write that a silent controller may still execute is retried only when it cannot any
        /// more; without, true. Not an option of SPDK, which retries at once
        quiesce_wait: Option<bool>,
        /// Whether a guest's memory is mapped for PCIe devices as a whole, which pins it, instead of copying
        /// its data; without, true. Not an option of SPDK, which maps
        map_lent_memory: Option<bool>,
        /// Digests to authenticate with: sha256, sha384, sha512; all before
        dhchap_digests: Option<Vec<String>>,
        /// Groups to authenticate with: null, ffdhe2048, ffdhe3072, ffdhe4096, ffdhe6144, ffdhe8192; all
        /// before
        dhchap_dhgroups: Option<Vec<String>>,
    }
    only("arbitration is round robin") {
        arbitration_burst: u32 = 0,
        low_priority_weight: u32 = 0,
        medium_priority_weight: u32 = 0,
        high_priority_weight: u32 = 0,
    }
    only("the preferred path is used again when it is back") { disable_auto_failback: bool = false }
    only("a namespace without a UUID has its NGUID, or a random one") { generate_uuids: bool = false }
    only("errors are counted for each bdev, not by status") { nvme_error_stat: bool = false }
    only("operations are executed on whole buffers") { allow_accel_sequence: bool = false }
    only("memory is registered by chunks of 2 MiB") { rdma_umr_per_io: bool = false }
    one_of("flushes are always passed on") { enable_flush: bool = [true, false] }
    one_of("commands of a batch are submitted together") { delay_cmd_submit: bool = [true, false] }
    ignored("the driver does not have these options") {
        nvme_adminq_poll_period_us,
        nvme_ioq_poll_period_us,
        transport_retry_count,
        rdma_srq_size,
        rdma_max_cq_size,
        rdma_cm_event_timeout_ms,
    }
}

fn canonical_options(_: &NvmeModule, params: &mut SetOptions) -> Result<(), RpcError> {
    if params.action_on_timeout == Some(TimeoutAction::None) || params.timeout_us == Some(0) {
        (params.action_on_timeout, params.timeout_us) = (Some(TimeoutAction::None), Some(0));
    } else if params.action_on_timeout.is_some() {
        params.action_on_timeout = Some(TimeoutAction::Reset);
    }
    if let Some(multipath) = &params.multipath_opts {
        params.multipath_opts = Some(MultipathOpts::of(multipath.policy()?));
    }
    params.quiesce_wait = params.quiesce_wait.filter(|is_on| !is_on);
    params.map_lent_memory = params.map_lent_memory.filter(|is_on| !is_on);
    let mut options = AuthOptions::default();
    set_authentication(&mut options, params)?;
    (params.dhchap_digests, params.dhchap_dhgroups) = saved_authentication(&options);
    Ok(())
}

fn set_options(module: &NvmeModule, params: SetOptions) -> Result<bool, RpcError> {
    if !module.initiator.controllers().is_empty() {
        let message = "options must be set before the first controller is attached";
        return Err(RpcError::new(-1, message));
    }
    let mut options = module.options().clone();
    set_authentication(&mut options.authentication, &params)?;
    options.keep_alive_timeout_ms = params.keep_alive_timeout_ms.unwrap_or(options.keep_alive_timeout_ms);
    options.timeout_us = params.timeout_us.unwrap_or(options.timeout_us);
    if params.action_on_timeout == Some(TimeoutAction::None) {
        options.timeout_us = 0;
    }
    options.timeout_admin_us = params.timeout_admin_us.unwrap_or(options.timeout_admin_us);
    options.bdev_retry_count = params.bdev_retry_count.unwrap_or(options.bdev_retry_count);
    if options.bdev_retry_count < -1 {
        return Err(RpcError::invalid_params("bdev_retry_count must be -1 or more"));
    }
    options.io_queue_requests = params.io_queue_requests.unwrap_or(options.io_queue_requests);
    options.transport_ack_timeout = params.transport_ack_timeout.unwrap_or(options.transport_ack_timeout);
    // As SPDK, which takes 8 bits and uses 5.
    options.transport_ack_timeout = options.transport_ack_timeout.min(TRANSPORT_ACK_TIMEOUT_MAX);
    options.tcp_connect_timeout_ms = params.tcp_connect_timeout_ms.unwrap_or(options.tcp_connect_timeout_ms);
    options.transport_tos = params.transport_tos.unwrap_or(options.transport_tos);
    options.io_path_stat = params.io_path_stat.unwrap_or(options.io_path_stat);
    options.quiesce_wait = params.quiesce_wait.unwrap_or(options.quiesce_wait);
    options.map_lent_memory = params.map_lent_memory.unwrap_or(options.map_lent_memory);
    options.loss_timeouts = (
        params.ctrlr_loss_timeout_sec.unwrap_or(options.loss_timeouts.0),
        params.reconnect_delay_sec.unwrap_or(options.loss_timeouts.1),
        params.fast_io_fail_timeout_sec.unwrap_or(options.loss_timeouts.2),
    );
    reconnect_policy(options.loss_timeouts)?;
    if let Some(multipath) = params.multipath_opts {
        options.policy = multipath.policy()?;
    }
    let (dhchap_digests, dhchap_dhgroups) = saved_authentication(&options.authentication);
    let saved = SetOptions {
        dhchap_digests,
        dhchap_dhgroups,
        action_on_timeout: Some(if options.timeout_us == 0 {
            TimeoutAction::None
        } else {
            TimeoutAction::Reset
        }),
        timeout_us: Some(options.timeout_us),
        timeout_admin_us: Some(options.timeout_admin_us),
        keep_alive_timeout_ms: Some(options.keep_alive_timeout_ms),
        bdev_retry_count: Some(options.bdev_retry_count),
        io_queue_requests: Some(options.io_queue_requests),
        transport_ack_timeout: Some(options.transport_ack_timeout),
        tcp_connect_timeout_ms: Some(options.tcp_connect_timeout_ms),
        transport_tos: Some(options.transport_tos),
        ctrlr_loss_timeout_sec: Some(options.loss_timeouts.0),
        reconnect_delay_sec: Some(options.loss_timeouts.1),
        fast_io_fail_timeout_sec: Some(options.loss_timeouts.2),
        multipath_opts: Some(MultipathOpts::of(options.policy)),
        io_path_stat: Some(options.io_path_stat),
        quiesce_wait: (!options.quiesce_wait).then_some(false),
        map_lent_memory: (!options.map_lent_memory).then_some(false),
    };
    *module.options() = options;
    module.saved.options.record("options", "bdev_nvme_set_options", &saved);
    Ok(true)
}

/// Takes the digests and groups of a call.
fn set_authentication(options: &mut AuthOptions, params: &SetOptions) -> Result<(), RpcError> {
    let invalid = |name, error| RpcError::invalid_params(format!("{name}: {error}"));
    if let Some(names) = &params.dhchap_digests {
        options.hashes =
            AuthOptions::parse_hashes(names).map_err(|error| invalid("dhchap_digests", error))?;
    }
    if let Some(names) = &params.dhchap_dhgroups {
        options.groups =
            AuthOptions::parse_groups(names).map_err(|error| invalid("dhchap_dhgroups", error))?;
    }
    Ok(())
}

/// Digests and groups as they are saved: `None` for all.
fn saved_authentication(options: &AuthOptions) -> (Option<Vec<String>>, Option<Vec<String>>) {
    let default = AuthOptions::default();
    (
        (options.hashes != default.hashes).then(|| options.hash_names()),
        (options.groups != default.groups).then(|| options.group_names()),
    )
}

pub(super) fn reconnect_policy((loss, delay, fast_fail): LossTimeouts) -> Result<ReconnectPolicy, RpcError> {
    let policy = ReconnectPolicy::from_seconds(loss, delay, fast_fail);
    policy.map_err(|error| RpcError::new(RpcError::EINVAL, error))
}
