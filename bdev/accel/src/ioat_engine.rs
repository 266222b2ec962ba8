//! The engine `ioat`: functions of Intel's DMA engine, one for each core that copies.
//!
//! [`IoatFunctions`] are the functions that were found. A core's [`IoatPort`](port::IoatPort) takes one when
//! an operation is first asked for; a core for which none is left uses the CPU.

mod port;

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use dma::DeviceMappings;
use ioat::{IoatAddress, IoatFunction, IoatOpenError};

pub use port::{DeviceFailure, DeviceOutcome};
pub(crate) use port::{IoatPort, PortUser};

/// The functions of a program.
#[derive(Default)]
pub(crate) struct IoatFunctions {
    functions: Mutex<Vec<KnownFunction>>,
    /// Changes with each scan, so that cores without a function look again.
    scans: AtomicU32,
}

struct KnownFunction {
    address: IoatAddress,
    state: FunctionState,
    counts: Arc<IoatCounts>,
}

enum FunctionState {
    /// No core has taken it.
    Free(Arc<DeviceMappings<IoatFunction>>),
    /// The core of this index has it.
    Taken(usize),
    /// It was closed for this reason.
    Closed(String),
}

/// What a function has done. The core that has it counts; others may read.
#[derive(Default)]
pub(crate) struct IoatCounts {
    pub(crate) executed: AtomicU64,
    pub(crate) bytes: AtomicU64,
    pub(crate) failed: AtomicU64,
    pub(crate) resets: AtomicU64,
}

/// A function, as `ioat_get_channels` reports it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IoatChannelInfo {
    /// Where it is.
    pub address: String,
    /// The core that uses it.
    pub core: Option<usize>,
    /// Why it was closed.
    pub failure: Option<String>,
    /// Operations that it has executed.
    pub executed: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Operations that it was given, and that the CPU has executed or that have failed.
    pub failed: u64,
    /// Resets of its channel, that of the start included.
    pub resets: u64,
}

impl IoatFunctions {
    /// Opens functions: those at these addresses; or without, every PCI function of the kind that is bound
    /// for user space, as far as it can be opened. One that is open stays as it is. Returns the number that
    /// were opened. It may wait.
    ///
    /// # Errors
    /// One of the addresses cannot be opened; those before it are.
    pub(crate) fn scan(&self, addresses: &[IoatAddress]) -> Result<usize, IoatOpenError> {
        let mut opened = 0;
        let found = if addresses.is_empty() { bound_functions() } else { addresses.to_vec() };
        for address in found.into_iter().collect::<BTreeSet<_>>() {
            if self.is_open(&address) {
                continue;
            }
            match IoatFunction::open(&address) {
                Ok(mappings) => {
                    self.add(address, mappings);
                    opened += 1;
                }
                Err(error) if addresses.is_empty() => log::warn!(target: "ioat", "{error}"),
                Err(error) => return Err(error),
            }
        }
        self.scans.fetch_add(1, Ordering::Release);
        Ok(opened)
    }

    /// Whether there was a scan.
    pub(crate) fn is_enabled(&self) -> bool {
        self.scans() > 0
    }

    fn scans(&self) -> u32 {
        self.scans.load(Ordering::Acquire)
    }

    fn is_open(&self, address: &IoatAddress) -> bool {
        let functions = sync::lock(&self.functions);
        let is_it = |known: &&KnownFunction| known.address == *address;
        functions.iter().find(is_it).is_some_and(|known| !matches!(known.state, FunctionState::Closed(_)))
    }

    fn add(&self, address: IoatAddress, mappings: Arc<DeviceMappings<IoatFunction>>) {
        let mut functions = sync::lock(&self.functions);
        functions.retain(|known| known.address != address);
        functions.push(KnownFunction {
            address,
            state: FunctionState::Free(mappings),
            counts: Arc::default(),
        });
    }

    /// Takes a function for a core.
    fn take(&self, core: usize) -> Option<(Arc<DeviceMappings<IoatFunction>>, Arc<IoatCounts>)> {
        let mut functions = sync::lock(&self.functions);
        let known = functions.iter_mut().find(|known| matches!(known.state, FunctionState::Free(_)))?;
        match std::mem::replace(&mut known.state, FunctionState::Taken(core)) {
            FunctionState::Free(mappings) => Some((mappings, known.counts.clone())),
            _ => None,
        }
    }

    /// Notes that a core has closed its function.
    fn close(&self, address: &IoatAddress, reason: String) {
        let mut functions = sync::lock(&self.functions);
        if let Some(known) = functions.iter_mut().find(|known| known.address == *address) {
            known.state = FunctionState::Closed(reason);
        }
    }

    /// All functions, in the order in which they were found.
    pub(crate) fn list(&self) -> Vec<IoatChannelInfo> {
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let info = |known: &KnownFunction| IoatChannelInfo {
            address: known.address.to_string(),
            core: match known.state {
                FunctionState::Taken(core) => Some(core),
                _ => None,
            },
            failure: match &known.state {
                FunctionState::Closed(reason) => Some(reason.clone()),
                _ => None,
            },
            executed: read(&known.counts.executed),
            bytes: read(&known.counts.bytes),
            failed: read(&known.counts.failed),
            resets: read(&known.counts.resets),
        };
        sync::lock(&self.functions).iter().map(info).collect()
    }
}

/// The PCI functions that a user space driver may open.
fn bound_functions() -> Vec<IoatAddress> {
    let functions = pci::enumerate(&pci::Sysfs::default()).unwrap_or_else(|error| {
        log::warn!(target: "ioat", "{error}");
        Vec::new()
    });
    let is_bound =
        |info: &pci::PciFunctionInfo| pci::is_ioat(info.vendor, info.device) && pci::is_for_user_space(info);
    functions.iter().filter(|info| is_bound(info)).map(|info| IoatAddress::Pci(info.address)).collect()
}
