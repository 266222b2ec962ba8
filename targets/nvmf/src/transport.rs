//! What the target asks of a transport.
//!
//! A transport is a folder of this crate and a line in [`TRANSPORTS`](crate::transports::TRANSPORTS); nothing
//! else names it. It has three parts:
//!
//! 1. A [`TransportKind`], which is there before the transport is created: its name, its addresses, the
//!    declaration of its parameters, its own RPC methods.
//! 2. A [`TransportConfig`]: its options, decoded and checked, which create it.
//! 3. A [`Transport`], which listens and reports. It has a group of connections on every core
//!    ([`TargetCores`](target_shell::TargetCores)). How these accept, where they are placed, how they are
//!    polled and drained is its [`Protocol`](target_shell::Protocol); there the calls are static, so that no
//!    I/O pays for the traits of this file.
//!
//! The groups, with what they allocated, end with their reactors.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use bdev::Registry;
use control::json::{Map, Value};
use control::{BalancedTarget, DecodeLog, Method, Parameter, ParameterError};
use nvme_controller::{ControllerDirectory, ControllerLimits};
use reactor::ReactorHandle;
use sockets::{ServerNetwork, Sockets};
use target_shell::{ConnectionTotals, Publisher, ShellError};
use wire_nvme::identify::fuses;
use wire_nvme::log::TransportAddress;

use crate::module::NvmfModule;
use crate::queue_report::QueueReport;
use crate::queue_totals::QueueTotalsSnapshot;
use crate::snapshot::ConfigSnapshot;
use crate::{ListenAddress, NvmfTargetError, TargetStats};

/// A type of transport, whether it is created or not.
pub trait TransportKind: Sync {
    /// `trtype`, in upper case.
    fn name(&self) -> &'static str;

    /// What its addresses are, for the reference.
    fn address_text(&self) -> AddressText;

    /// How its addresses are used.
    fn listening(&self) -> Listening;

    /// Whether its connections can begin with TLS.
    fn has_tls(&self) -> bool {
        false
    }

    /// The canonical form of an address, which is stored and compared.
    ///
    /// # Errors
    /// It is no address of this transport to listen on.
    fn normalize(&self, address: &ListenAddress) -> Result<ListenAddress, NvmfTargetError>;

    /// The fields of an address in an entry of the discovery log. `None` if hosts do not connect through it
    /// by discovery.
    fn discovery_address(&self, address: &ListenAddress) -> Option<TransportAddress>;

    /// The declaration of its parameters of `nvmf_create_transport`.
    fn parameters(&self) -> TransportParameters;

    /// Takes its parameters out of an object, in which those of others stay.
    ///
    /// # Errors
    /// A parameter has the wrong type. Ranges are checked by [`TransportConfig::check`].
    fn decode(
        &self,
        object: &mut Map<String, Value>,
        log: &mut DecodeLog,
    ) -> Result<Box<dyn TransportConfig>, ParameterError>;

    /// RPC methods that only it has.
    fn methods(&self) -> Vec<Method<NvmfModule>> {
        Vec::new()
    }

    /// What its counters in `nvmf_get_stats` mean: sentences for the reference, each with a space before it.
    fn counters_text(&self) -> &'static str {
        ""
    }
}

/// Texts of the reference about a transport's addresses.
#[derive(Clone, Copy, Debug)]
pub struct AddressText {
    /// What `traddr` is.
    pub traddr: &'static str,
    /// What `trsvcid` is, if it is used.
    pub trsvcid: Option<&'static str>,
}

/// How addresses of a transport are used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Listening {
    /// Several subsystems may listen on one, and the discovery service answers there. The address is known
    /// when it is open.
    Shared,
    /// Each belongs to one subsystem, whose controller a client gets without Connect. It is opened when every
    /// core knows the subsystem.
    Exclusive,
}

/// Parameters of `nvmf_create_transport`.
#[derive(Debug, Default)]
pub struct TransportParameters {
    /// Those that SPDK has too.
    pub shared: Vec<Parameter>,
    /// Those that only Ringbolt has.
    pub own: Vec<Parameter>,
}

/// The options of a transport, which create it. `N` is the network of the transports that use one.
pub trait TransportConfig<N: ServerNetwork = Sockets>: fmt::Debug + Send + Sync + 'static {
    /// The type of the transport.
    fn kind(&self) -> &'static dyn TransportKind;

    /// Checks the options.
    ///
    /// # Errors
    /// One is out of range.
    fn check(&self) -> Result<(), NvmfTargetError>;

    /// All options as parameters that decode to the same.
    fn to_object(&self) -> Map<String, Value>;

    /// Starts a group of connections on every reactor, and waits for them.
    ///
    /// # Errors
    /// An option is out of range, or a reactor does not respond.
    fn start(&self, parts: &TransportParts<'_>) -> Result<Box<dyn Transport>, NvmfTargetError>;
}

/// Optional commands that the controllers of a transport do not have, as bits of Identify Controller.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MaskedCommands {
    /// Of ONCS.
    pub oncs: u16,
    /// Of FUSES.
    pub fuses: u16,
}

impl MaskedCommands {
    pub(crate) fn apply_to(self, limits: &mut ControllerLimits) {
        limits.masked_oncs |= self.oncs;
        limits.compare_and_write &= self.fuses & fuses::COMPARE_AND_WRITE == 0;
    }
}

/// What a target gives its transports.
#[derive(Clone, Copy)]
pub struct TransportParts<'a> {
    /// The block devices, to which connections name their tenants.
    pub(crate) registry: &'a Registry,
    /// Reactors, each of which gets a group: those of the target, or of its `poll_groups_mask`.
    pub(crate) reactors: &'a [ReactorHandle],
    /// The configuration.
    pub(crate) publisher: &'a Publisher<ConfigSnapshot>,
    /// Commands that its controllers do not have.
    pub(crate) masked: MaskedCommands,
    /// The controllers of all transports.
    pub(crate) directory: &'a Arc<ControllerDirectory>,
}

/// A transport that was created. Its calls are made on control threads, with the target's lock.
pub trait Transport: Any + Send {
    /// The options that it was created with, as parameters.
    fn options(&self) -> Map<String, Value>;

    /// Listens on an address in its canonical form. Connections carry `portid`. Returns the address as it is
    /// open: with what was left to the machine. With `secure`, which only a transport [that has
    /// TLS](TransportKind::has_tls) gets, each connection begins with it.
    ///
    /// # Errors
    /// The address cannot be used, or the core that listens does not answer; nothing listens then.
    fn listen(
        &self,
        address: &ListenAddress,
        portid: u16,
        secure: bool,
    ) -> Result<ListenAddress, NvmfTargetError>;

    /// Stops listening on a port; connections stay.
    ///
    /// # Errors
    /// The core that listens does not answer. It stops when it runs again.
    fn stop_listening(&self, portid: u16) -> Result<(), ShellError>;

    /// The target stops: stops listening on all ports, and disconnects the hosts, each after its commands in
    /// flight have completed ([`TargetCores::drain`](target_shell::TargetCores::drain)).
    ///
    /// # Errors
    /// Connections are left after the time that it has.
    fn shutdown(&self) -> Result<(), ShellError>;

    /// The name of its connections in metrics, and what is counted of them.
    fn connections(&self) -> (&'static str, ConnectionTotals);

    /// Its groups, if connections are assigned to them, or move between them. By default neither.
    fn balanced(&self) -> Option<Arc<dyn BalancedTarget>> {
        None
    }

    /// The queues of each reactor.
    ///
    /// # Errors
    /// The first core that does not answer.
    fn queues(&self) -> Result<Vec<CoreQueues>, ShellError>;

    /// What only this transport counts, for each reactor. Sets the fields of `stats` that are this
    /// transport's. By default it counts nothing.
    ///
    /// # Errors
    /// As [`queues`](Self::queues).
    fn counters(
        &self,
        reactors: &[ReactorHandle],
        stats: &mut TargetStats,
    ) -> Result<Vec<Counters>, ShellError> {
        _ = stats;
        Ok(vec![Counters::new(); reactors.len()])
    }
}

/// Counters by name, as `nvmf_get_stats` reports them.
pub type Counters = Vec<(&'static str, u64)>;

/// The queues of a transport on one core.
#[derive(Debug, Default)]
pub struct CoreQueues {
    /// What they have done, those included that are closed.
    pub(crate) totals: QueueTotalsSnapshot,
    /// Those that are open.
    pub(crate) open: Vec<QueueReport>,
}
