//! What the connections of a core share: notifications in both directions.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;

use os::{EventClient, EventCompletion, EventSignaler, Interest, WatchId};
use reactor::Core;
use scsi::{CoreEvents, SessionNexuses};
use sockets::StreamAddress;
use target_shell::{Accepted, Connections, GroupWaker, Protocol};

use crate::connection::{NewConnection, VhostConnection};
use crate::controller::VhostConfig;
use crate::failure::VhostViolation;
use crate::limits::WATCHES_MAX;
use crate::links::CoreLinks;
use crate::session::FrontendSession;
use crate::worker::{ConnectionPlace, Worker, WorkerStart};
use crate::workers::Workers;

/// The protocol's state of a core.
pub(crate) struct VhostCore {
    /// Index of its reactor.
    index: usize,
    links: Arc<CoreLinks>,
    config: Arc<VhostConfig>,
    notifications: Rc<Notifications>,
    events: Vec<EventCompletion>,
    /// Connections whose drivers have notified, for one poll.
    notified: Vec<u64>,
    last_token: u64,
    tasks: Arc<CoreEvents>,
    /// Identifiers of the logical units that [`tasks`](Self::tasks) subscribes to.
    subscribed: BTreeSet<u64>,
    /// SIGBUS faults in client memory that were handled so far.
    sigbus_count_seen: u32,
}

/// The eventfds of a core's connections: watches of those that drivers signal, and what signals drivers.
///
/// Drivers share the eventfds and may fill their counters and change their flags at any time. So they are neither read
/// nor written, which could block: watches are edge-triggered, and the kernel signals ([`EventSignaler`]).
pub(crate) struct Notifications {
    client: EventClient,
    /// Number of eventfds that are watched.
    watches: Cell<u32>,
    signaler: RefCell<Option<EventSignaler>>,
    has_failed: Cell<bool>,
}

/// An eventfd that a driver signals, watched until it is dropped.
pub(crate) struct DriverNotification {
    notifications: Rc<Notifications>,
    watch: WatchId,
    _eventfd: OwnedFd,
}

impl Notifications {
    fn new(core: &Core) -> Notifications {
        Notifications {
            client: core.event_loop().client(),
            watches: Cell::new(0),
            signaler: RefCell::new(None),
            has_failed: Cell::new(false),
        }
    }

    /// Watches an eventfd for a connection; `None` if there are [`WATCHES_MAX`], or the kernel can watch no more.
    pub(crate) fn watch(self: &Rc<Self>, eventfd: OwnedFd, token: u64) -> Option<DriverNotification> {
        if self.watches.get() >= WATCHES_MAX {
            return None;
        }
        let watch = self.client.watch(eventfd.as_fd(), Interest::READABLE, token).ok()?;
        self.watches.update(|count| count + 1);
        Some(DriverNotification { notifications: self.clone(), watch, _eventfd: eventfd })
    }

    /// Signals a driver.
    #[inline]
    pub(crate) fn signal(&self, eventfd: BorrowedFd<'_>) {
        // A connection is accepted only when there is one.
        if let Some(signaler) = &mut *self.signaler.borrow_mut() {
            // It is an eventfd, so this fails only for lack of kernel memory; drivers time out and look.
            _ = signaler.signal(eventfd);
        }
    }

    /// Whether drivers can be signalled.
    pub(crate) fn can_signal(&self) -> bool {
        let mut signaler = self.signaler.borrow_mut();
        if signaler.is_none() {
            *signaler = self.create();
        }
        signaler.is_some()
    }

    #[cold]
    fn create(&self) -> Option<EventSignaler> {
        match EventSignaler::new() {
            Ok(signaler) => Some(signaler),
            Err(error) => {
                if !self.has_failed.replace(true) {
                    log::error!(target: "vhost", "drivers cannot be notified: {error} (see fs.aio-max-nr)");
                }
                None
            }
        }
    }
}

impl Drop for DriverNotification {
    fn drop(&mut self) {
        self.notifications.client.unwatch(self.watch);
        self.notifications.watches.update(|count| count - 1);
    }
}

impl VhostCore {
    /// `waker` wakes its group; there is none where that is polled. `links` are those of all cores; without any, the core
    /// serves all virtqueues of its connections.
    pub(crate) fn new(core: &Core, waker: Option<&GroupWaker>, links: Arc<CoreLinks>) -> VhostCore {
        if let Some(waker) = waker {
            links.join(core.index(), waker);
        }
        let wake = waker.cloned().map(|waker| Box::new(move || waker.wake()) as Box<dyn Fn() + Send + Sync>);
        VhostCore {
            index: core.index(),
            links,
            config: Arc::default(),
            notifications: Rc::new(Notifications::new(core)),
            events: Vec::new(),
            notified: Vec::new(),
            last_token: 0,
            tasks: CoreEvents::new(wake),
            subscribed: BTreeSet::new(),
            sigbus_count_seen: dma::sigbus_fault_count(),
        }
    }

    /// Index of its reactor.
    pub(crate) fn index(&self) -> usize {
        self.index
    }

    /// Continues the connections whose drivers have notified.
    #[cold]
    fn process_notifications(&mut self, connections: &mut Connections<VhostConnection>) {
        self.notified.extend(self.events.drain(..).map(|event| event.tag));
        self.notified.sort_unstable();
        self.notified.dedup();
        let notified = &self.notified;
        connections.update(|_, entry| {
            let is_notified = !entry.is_closed() && notified.binary_search(&entry.connection.token()).is_ok();
            if is_notified {
                entry.connection.on_notification();
            }
            is_notified
        });
        self.notified.clear();
    }

    /// Continues connections for which other cores have something, and starts workers.
    #[cold]
    fn process_signal(
        &mut self,
        starts: Vec<WorkerStart>,
        connections: &mut Connections<VhostConnection>,
        now_ns: u64,
    ) {
        connections.update(|_, entry| {
            let is_open = !entry.is_closed();
            if is_open {
                entry.connection.on_signal();
            }
            is_open
        });
        for start in starts {
            let exchange = start.exchange.clone();
            let controller_id = start.controller_id;
            if self.start_worker(start, connections, now_ns).is_none() {
                if let Some(controller) = self.config.by_id(controller_id) {
                    let (name, core) = (&controller.name, self.index);
                    log::warn!(target: "vhost", "{name}: core {core} cannot serve virtqueues; the client is disconnected");
                }
                exchange.end(&self.links);
            }
        }
    }

    /// Starts a worker; `None` if there is no room for it, or its controller was deleted.
    fn start_worker(
        &mut self,
        start: WorkerStart,
        connections: &mut Connections<VhostConnection>,
        now_ns: u64,
    ) -> Option<()> {
        let controller = self.config.by_id(start.controller_id)?.clone();
        if !self.notifications.can_signal() {
            return None;
        }
        self.last_token += 1;
        let peer = StreamAddress::Unix(PathBuf::from(&controller.name));
        let new = NewConnection {
            controller,
            notifications: self.notifications.clone(),
            events: &self.tasks,
            nexuses: start.nexuses,
            token: self.last_token,
            flow: start.flow,
            now_ns,
        };
        let mut worker = Worker::new(start.exchange, self.links.clone());
        // It may have been closed already.
        let event = worker.on_signal();
        let mut connection = VhostConnection::of_worker(new, worker);
        connection.on_worker_event(event);
        connections.attach(connection, peer).ok().map(|_| ())
    }

    /// Disconnects clients whose shared memory raised SIGBUS, because they truncated the file.
    #[cold]
    fn disconnect_poisoned(&mut self, connections: &mut Connections<VhostConnection>) {
        connections.update(|_, entry| !entry.is_closed() && entry.connection.check_memory());
    }
}

impl Protocol for VhostCore {
    const NAME: &'static str = "vhost";
    type Config = VhostConfig;
    type Connection = VhostConnection;
    type Error = VhostViolation;

    fn accept(
        &mut self,
        accepted: Accepted,
        config: &Arc<VhostConfig>,
        now_ns: u64,
    ) -> Option<VhostConnection> {
        let controller = config.of_port(accepted.portid)?.clone();
        if !self.notifications.can_signal() {
            return None;
        }
        self.last_token += 1;
        let place = ConnectionPlace { core: self.index, token: self.last_token };
        let nexuses = Arc::<SessionNexuses>::default();
        let workers = Workers::new(self.links.clone(), place, &controller, nexuses.clone());
        let new = NewConnection {
            controller,
            notifications: self.notifications.clone(),
            events: &self.tasks,
            nexuses,
            token: self.last_token,
            flow: accepted.flow,
            now_ns,
        };
        Some(VhostConnection::of_session(new, FrontendSession::new(workers)))
    }

    fn may_serve(&self, config: &Arc<VhostConfig>, portid: u16, group: usize) -> bool {
        config.of_port(portid).is_none_or(|controller| controller.reactors.contains(&group))
    }

    fn apply(
        &mut self,
        config: &Arc<VhostConfig>,
        connections: &mut Connections<VhostConnection>,
        _now_ns: u64,
    ) {
        for unit in config.units().filter(|unit| !self.subscribed.contains(&unit.id)) {
            unit.unit.subscribe(&self.tasks);
        }
        self.subscribed = config.units().map(|unit| unit.id).collect();
        self.config = config.clone();
        connections.update(|_, entry| !entry.is_closed() && entry.connection.apply(config));
    }

    #[inline]
    fn begin_poll(&mut self, connections: &mut Connections<VhostConnection>, now_ns: u64) -> usize {
        let mut count = self.notifications.client.reap(&mut self.events);
        if count > 0 {
            self.process_notifications(connections);
        }
        if let Some(functions) = self.tasks.take() {
            connections.update(|_, entry| {
                let is_closed = entry.is_closed();
                entry.connection.on_task_event(&functions, is_closed);
                !is_closed
            });
        }
        if let Some(starts) = self.links.take(self.index) {
            count += 1;
            self.process_signal(starts, connections, now_ns);
        }
        let faults = dma::sigbus_fault_count();
        if faults != self.sigbus_count_seen {
            self.sigbus_count_seen = faults;
            self.disconnect_poisoned(connections);
        }
        count
    }
}
