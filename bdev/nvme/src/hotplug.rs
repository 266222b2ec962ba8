//! Hot plug: controllers that are inserted are attached, and those that are removed are detached.
//!
//! [`HotplugPlan`] decides, sans-IO. One thread looks at the [`HotplugBus`], for [`PciBus`] when the kernel
//! reports a change and in intervals, and performs what was decided, one after the other: an attachment
//! blocks until the namespaces of the controller are scanned.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use control::JobHandle;
use nvme::{PcieUri, Uri};
use pci::{HotplugEvent, HotplugMonitor, PciAddress, PciFunctionInfo, Sysfs};
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};

use crate::attach::Attach;
use crate::initiator::{Initiator, InitiatorError};
use crate::path::TransportId;

/// Interval between looks at the bus by default; SPDK's.
pub const HOTPLUG_PERIOD_DEFAULT: Duration = Duration::from_micros(100_000);
/// Longest interval; SPDK's.
pub const HOTPLUG_PERIOD_MAX: Duration = Duration::from_micros(10_000_000);
/// Longest interval between attempts to attach one controller.
const RETRY_MAX: Duration = Duration::from_secs(10);
/// Looks at the bus after which all its functions are listed, even if nothing seems to have changed.
const LOOKS_UNCHANGED_MAX: u32 = 100;
/// Uevents that are read at once, so that a flood of them does not keep the thread from its work.
const UEVENTS_MAX: usize = 4096;

/// A controller on the bus.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HotplugFunction {
    /// Its address.
    pub id: TransportId,
    /// A driver for user space is bound to it, so that it may be attached.
    pub is_ours: bool,
}

/// Where controllers come and go.
pub trait HotplugBus: Send + 'static {
    /// The NVMe controllers that are present; `None` if it is known that nothing has changed since the last
    /// call.
    ///
    /// # Errors
    /// Why they cannot be listed. What is attached stays as it is.
    fn functions(&mut self) -> io::Result<Option<Vec<HotplugFunction>>>;

    /// Whether a controller is one of this bus, so that it is gone when it is not listed.
    fn has(&self, id: &TransportId) -> bool;

    /// Waits until something may have changed, `wake` is readable, or the time is over.
    fn wait(&mut self, wake: BorrowedFd<'_>, timeout: Duration);
}

/// What is to be done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum HotplugAction {
    Attach(TransportId),
    Detach(TransportId),
}

/// What is known of a controller that is present.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Presence {
    /// It is attached, or is being attached.
    Attached,
    /// It was detached by request, or is being ejected: it is left alone until it is removed or attached by
    /// request.
    Detached,
    /// It could not be attached; the next attempt, and the interval to the one after it.
    Retry { at: Instant, interval: Duration },
}

/// Decides what is attached and detached. Requests reach it even while hot plug is off.
#[derive(Debug, Default)]
pub(crate) struct HotplugPlan {
    present: BTreeMap<String, (TransportId, Presence)>,
    listed: Vec<HotplugFunction>,
}

impl HotplugPlan {
    /// A controller was detached by request.
    pub(crate) fn detached(&mut self, id: &TransportId) {
        self.present.insert(id.0.controller(), (id.clone(), Presence::Detached));
    }

    /// A controller is attached, by request or by an action.
    pub(crate) fn attached(&mut self, id: &TransportId) {
        self.present.insert(id.0.controller(), (id.clone(), Presence::Attached));
    }

    /// A controller could not be attached. Returns whether this was the first attempt.
    fn failed(&mut self, id: &TransportId, now: Instant, period: Duration) -> bool {
        let known = self.present.get(&id.0.controller()).map(|(_, presence)| *presence);
        let (is_first, interval) = match known {
            Some(Presence::Retry { interval, .. }) => (false, interval.saturating_mul(2).min(RETRY_MAX)),
            _ => (true, period),
        };
        let presence = Presence::Retry { at: now + interval, interval };
        self.present.insert(id.0.controller(), (id.clone(), presence));
        is_first
    }

    /// Decides, from the controllers that are present, `None` if these are the same as before, and those of
    /// the bus that are attached.
    fn update(
        &mut self,
        listed: Option<Vec<HotplugFunction>>,
        attached: &[TransportId],
        now: Instant,
    ) -> Vec<HotplugAction> {
        if let Some(listed) = listed {
            self.listed = listed;
        }
        let is_listed = |id: &TransportId| {
            self.listed.iter().any(|function| function.id.0.controller() == id.0.controller())
        };
        // What is gone is forgotten: another one in its place is new.
        self.present.retain(|_, (id, _)| is_listed(id));
        let gone = attached.iter().filter(|id| !is_listed(id));
        let mut actions: Vec<HotplugAction> = gone.cloned().map(HotplugAction::Detach).collect();
        for HotplugFunction { id, is_ours } in &self.listed {
            let key = id.0.controller();
            if attached.iter().any(|other| other.0.controller() == key) {
                self.present.insert(key, (id.clone(), Presence::Attached));
                continue;
            }
            if !is_ours {
                self.present.remove(&key);
                continue;
            }
            match self.present.get(&key).map(|(_, presence)| *presence) {
                None => actions.push(HotplugAction::Attach(id.clone())),
                Some(Presence::Retry { at, .. }) if at <= now => {
                    actions.push(HotplugAction::Attach(id.clone()));
                }
                // Not by an action: by request, by its driver, which has to release it, or because it has
                // failed.
                Some(Presence::Attached) => _ = self.present.insert(key, (id.clone(), Presence::Detached)),
                Some(Presence::Retry { .. } | Presence::Detached) => {}
            }
        }
        actions
    }

    /// The time of the next attempt.
    fn next_attempt(&self) -> Option<Instant> {
        let retries = self.present.values().filter_map(|(_, presence)| match presence {
            Presence::Retry { at, .. } => Some(*at),
            Presence::Attached | Presence::Detached => None,
        });
        retries.min()
    }
}

/// How a controller that was inserted is attached, with a name.
pub type AttachInserted = Box<dyn Fn(&str, TransportId) -> Attach + Send>;

/// The thread that attaches and detaches, while it is [enabled](Self::set).
pub struct Hotplug(Arc<HotplugState>);

struct HotplugState {
    initiator: Initiator,
    /// An eventfd, from the first time that it is enabled.
    wake: OnceLock<OwnedFd>,
    settings: Mutex<HotplugSettings>,
    plan: Mutex<HotplugPlan>,
}

#[derive(Clone, Copy, Debug)]
struct HotplugSettings {
    /// `None` while it is off.
    period: Option<Duration>,
    is_running: bool,
    is_stopped: bool,
}

impl Hotplug {
    /// Without a thread, which starts when it is enabled first.
    pub fn new(initiator: Initiator) -> Hotplug {
        let settings = HotplugSettings { period: None, is_running: false, is_stopped: false };
        Hotplug(Arc::new(HotplugState {
            initiator,
            wake: OnceLock::new(),
            settings: Mutex::new(settings),
            plan: Mutex::default(),
        }))
    }

    /// Looks at a bus in intervals of `period` from now on, or at none. `open_bus` and `attach` are used when
    /// it is enabled first. What is attached stays attached when it is disabled.
    ///
    /// # Errors
    /// There can be no thread or descriptor, or no bus.
    pub fn set<B: HotplugBus>(
        &self,
        period: Option<Duration>,
        open_bus: impl FnOnce() -> io::Result<B>,
        attach: AttachInserted,
    ) -> io::Result<()> {
        let mut settings = sync::lock(&self.0.settings);
        if period.is_some() && !settings.is_running {
            let (bus, state) = (open_bus()?, self.0.clone());
            if state.wake.get().is_none() {
                let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
                state.wake.get_or_init(|| event);
            }
            let thread = std::thread::Builder::new().name("nvme-hotplug".to_string());
            thread.spawn(move || state.run(bus, &attach))?;
            settings.is_running = true;
        }
        // The thread reads it after this lock.
        settings.period = period.map(|period| period.min(HOTPLUG_PERIOD_MAX));
        drop(settings);
        self.0.wake();
        Ok(())
    }

    pub(crate) fn plan(&self) -> std::sync::MutexGuard<'_, HotplugPlan> {
        sync::lock(&self.0.plan)
    }

    /// Ends the thread, after what it does now.
    pub fn stop(&self) {
        sync::lock(&self.0.settings).is_stopped = true;
        self.0.wake();
    }
}

impl Drop for Hotplug {
    fn drop(&mut self) {
        self.stop();
    }
}

impl HotplugState {
    fn wake(&self) {
        if let Some(wake) = self.wake.get() {
            // An eventfd that nothing else writes takes one.
            _ = rustix::io::write(wake, &1u64.to_ne_bytes());
        }
    }

    fn run(&self, mut bus: impl HotplugBus, attach: &AttachInserted) {
        let Some(wake) = self.wake.get() else { return };
        let (mut inserted, mut failure) = (0, None);
        loop {
            let settings = *sync::lock(&self.settings);
            if settings.is_stopped {
                return;
            }
            let Some(period) = settings.period else {
                bus.wait(wake.as_fd(), HOTPLUG_PERIOD_MAX);
                drain(wake);
                continue;
            };
            // Drivers notice a removal too.
            self.initiator.drop_empty();
            // First: what is attached afterwards may be younger than the list.
            let attached = self.attached(&bus);
            match bus.functions() {
                Ok(listed) => {
                    failure = None;
                    let actions = sync::lock(&self.plan).update(listed, &attached, Instant::now());
                    for action in actions {
                        if sync::lock(&self.settings).is_stopped {
                            return;
                        }
                        self.perform(action, attach, &mut inserted, period);
                    }
                }
                Err(error) => {
                    let text = error.to_string();
                    if failure.as_ref() != Some(&text) {
                        log::warn!(target: "bdev_nvme", "hot plug: the controllers cannot be listed: {text}");
                    }
                    failure = Some(text);
                }
            }
            let retry = sync::lock(&self.plan).next_attempt();
            let until_retry = retry.map_or(period, |at| at.saturating_duration_since(Instant::now()));
            bus.wait(wake.as_fd(), period.min(until_retry.max(Duration::from_millis(1))));
            drain(wake);
        }
    }

    /// The controllers of the bus that are attached, or are being attached.
    fn attached(&self, bus: &impl HotplugBus) -> Vec<TransportId> {
        let controllers = self.initiator.controllers();
        let paths = controllers.iter().flat_map(|controller| &controller.paths);
        paths.map(|path| path.config.id.clone()).filter(|id| bus.has(id)).collect()
    }

    fn perform(&self, action: HotplugAction, attach: &AttachInserted, inserted: &mut u32, period: Duration) {
        match action {
            HotplugAction::Attach(id) => {
                let taken: Vec<String> =
                    self.initiator.controllers().into_iter().map(|controller| controller.name).collect();
                let mut name = format!("HotInNvme{inserted}");
                while taken.contains(&name) {
                    *inserted += 1;
                    name = format!("HotInNvme{inserted}");
                }
                match self.initiator.attach(attach(&name, id.clone())) {
                    Ok(bdevs) => {
                        // A name is never used for two controllers.
                        *inserted += 1;
                        sync::lock(&self.plan).attached(&id);
                        let bdevs = bdevs.join(", ");
                        log::info!(target: "bdev_nvme", "{} was inserted: {name} with {bdevs}", id.traddr());
                    }
                    // A request was faster.
                    Err(InitiatorError::Exists(_)) => {}
                    Err(error) => {
                        if sync::lock(&self.plan).failed(&id, Instant::now(), period) {
                            log::warn!(target: "bdev_nvme", "{} was inserted, but: {error}", id.traddr());
                        }
                    }
                }
            }
            HotplugAction::Detach(id) => {
                let controllers = self.initiator.controllers();
                let of = controllers
                    .iter()
                    .find(|controller| controller.paths.iter().any(|path| path.config.id == id));
                let Some(controller) = of else { return };
                log::warn!(target: "bdev_nvme", "{}: {} was removed", controller.name, id.traddr());
                let detached =
                    self.initiator.detach(&controller.name, |other| *other == id, &JobHandle::standalone());
                match detached {
                    // Its driver may have noticed too.
                    Ok(()) | Err(InitiatorError::NotFound(_)) => {}
                    Err(error) => log::warn!(target: "bdev_nvme", "{}: {error}", controller.name),
                }
            }
        }
    }
}

fn drain(wake: &OwnedFd) {
    let mut count = [0; 8];
    _ = rustix::io::read(wake, &mut count);
}

/// The PCI functions of this machine.
pub struct PciBus {
    sysfs: Sysfs,
    devices: PathBuf,
    /// `None` where the kernel reports no events.
    events: Option<HotplugMonitor>,
    /// The names of all functions and the drivers of those that are NVMe controllers, when they were last
    /// listed.
    names: Vec<String>,
    controllers: Vec<PciFunctionInfo>,
    has_events: bool,
    looks: u32,
}

impl PciBus {
    /// The bus of `root`, which is `/`, or a directory with a fake system.
    pub fn new(root: impl Into<PathBuf>) -> PciBus {
        let root = root.into();
        PciBus {
            devices: root.join("sys/bus/pci/devices"),
            sysfs: Sysfs::new(root),
            events: HotplugMonitor::new().ok(),
            names: Vec::new(),
            controllers: Vec::new(),
            has_events: true,
            looks: 0,
        }
    }

    /// The names of all functions, which is what a look costs while nothing changes.
    fn names(&self) -> io::Result<Vec<String>> {
        let entries = match std::fs::read_dir(&self.devices) {
            // A system without PCI.
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries?,
        };
        let mut names = Vec::new();
        for entry in entries {
            names.extend(entry?.file_name().into_string().ok());
        }
        names.sort_unstable();
        Ok(names)
    }

    /// The driver that is bound to a controller now.
    fn driver(&self, address: PciAddress) -> Option<String> {
        let link = std::fs::read_link(self.devices.join(format!("{address}/driver"))).ok()?;
        link.file_name()?.to_str().map(str::to_string)
    }
}

impl HotplugBus for PciBus {
    fn functions(&mut self) -> io::Result<Option<Vec<HotplugFunction>>> {
        let names = self.names()?;
        self.looks += 1;
        let same_drivers = || self.controllers.iter().all(|one| one.driver == self.driver(one.address));
        if !self.has_events && self.looks < LOOKS_UNCHANGED_MAX && names == self.names && same_drivers() {
            return Ok(None);
        }
        let mut controllers = pci::enumerate(&self.sysfs).map_err(io::Error::other)?;
        controllers.retain(PciFunctionInfo::is_nvme);
        let of = |info: &PciFunctionInfo| HotplugFunction {
            id: transport_id(info.address),
            is_ours: pci::is_for_user_space(info),
        };
        let listed = controllers.iter().map(of).collect();
        (self.names, self.controllers, self.has_events, self.looks) = (names, controllers, false, 0);
        Ok(Some(listed))
    }

    fn has(&self, id: &TransportId) -> bool {
        matches!(id.0, Uri::Pcie(_))
    }

    fn wait(&mut self, wake: BorrowedFd<'_>, timeout: Duration) {
        let timeout = rustix::event::Timespec::try_from(timeout).ok();
        let Some(events) = &mut self.events else {
            _ = poll(&mut [PollFd::from_borrowed_fd(wake, PollFlags::IN)], timeout.as_ref());
            return;
        };
        let mut ready = [
            PollFd::from_borrowed_fd(wake, PollFlags::IN),
            PollFd::from_borrowed_fd(events.as_fd(), PollFlags::IN),
        ];
        _ = poll(&mut ready, timeout.as_ref());
        if ready[1].revents().is_empty() {
            return;
        }
        for _ in 0..UEVENTS_MAX {
            match events.receive() {
                Ok(Some(HotplugEvent::Other)) => {}
                Ok(Some(HotplugEvent::Function(_) | HotplugEvent::Missed)) => self.has_events = true,
                Ok(None) => return,
                Err(error) => {
                    log::warn!(target: "bdev_nvme", "hot plug: the kernel's events end: {error}");
                    self.events = None;
                    return;
                }
            }
        }
    }
}

fn transport_id(address: PciAddress) -> TransportId {
    TransportId(Uri::Pcie(PcieUri {
        domain: address.domain(),
        bus: address.bus(),
        device: address.device(),
        function: address.function(),
        nsid: 1,
    }))
}

#[cfg(test)]
mod tests;
