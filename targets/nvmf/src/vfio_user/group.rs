//! The endpoints of one core.
//!
//! A turn takes in messages of clients, fetches what is new on every submission queue, hands each block
//! device its requests in one batch, takes back what completed, and signals each completion queue once.
//! Doorbells are memory that clients write, so nothing tells of them: while a client is busy the core does
//! not sleep, and after that it looks ever less often, at least once a millisecond.

use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::mpsc::SyncSender;

use controller::reservation::{Bell, Drain};
use controller::{ConnectOk, Event};
use memory::Pool;
use reactor::{Core, Receiver, Shutdown};
use slots::{Slab, Slot};
use sys::{Client, Done, Interest, Watch};
use wire_nvme::fabrics::{CONNECT_DATA_SIZE, Connect, ConnectData, Nqn};
use wire_nvme::log::{AddressFamily, TransportAddress, TransportType};

use super::Shared;
use super::function::{Faults, Function, Lent};
use super::session::Session;
use super::socket::{End, Listening};
use crate::group::devices::Devices;
use crate::group_poller::Turns;
use crate::picture::Picture;

/// Endpoints of one core.
const ENDPOINTS_MAX: u32 = 1024;
/// Longest time between two looks at a client's doorbells.
const LOOK_NS_MAX: u64 = 1_000_000;
/// When to look again for memory that another core may have given back; there is no event for that.
const MEMORY_RETRY_NS: u64 = 1_000_000;

/// What is said to a group.
pub(crate) enum Message {
    /// The configuration has changed.
    Apply(Arc<Picture>, SyncSender<()>),
    /// Listen in a directory.
    Listen { directory: String, nqn: Nqn, portid: u16, answer: SyncSender<std::io::Result<()>> },
    /// Stop listening on a port.
    Unlisten { portid: u16, answer: SyncSender<()> },
    /// Wakes a group whose bell was rung.
    Look,
    /// Tell of every client.
    Report(SyncSender<Vec<Report>>),
    /// Let something go wrong; whether there is a client on that port.
    Inject { portid: u16, fault: Fault, answer: SyncSender<bool> },
}

/// What can go wrong on purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The controller fails: CSTS.CFS.
    Fatal,
    /// So many completions are not written.
    DropCompletions(u32),
    /// The device is gone: registers read as ones and nothing is done.
    Gone,
    /// Nothing is fetched from this submission queue.
    Stall(u16),
    /// The connection is closed.
    Disconnect,
    /// Nothing goes wrong any more; what happened is not undone.
    None,
}

/// What a group tells of a client.
#[derive(Clone, Debug)]
pub(crate) struct Report {
    pub(crate) group: usize,
    pub(crate) directory: String,
    pub(crate) subnqn: Nqn,
    pub(crate) cntlid: u16,
    /// Identifier, entries, commands and errors of every queue.
    pub(crate) queues: Vec<(u16, u32, u64, u64)>,
}

struct Endpoint {
    directory: String,
    nqn: Nqn,
    portid: u16,
    listening: Option<Listening>,
    watch: Option<Watch>,
    session: Option<Session>,
    session_watch: Option<Watch>,
    /// Somebody may want to connect.
    knocked: bool,
}

pub(crate) struct Group {
    index: usize,
    pool: Pool,
    shared: Shared,
    devices: Devices,
    endpoints: Slab<Endpoint>,
    /// Endpoints have indices below this.
    used: u32,
    events: Client,
    messages: Receiver<Message>,
    /// Rings when reservations concern clients of this core.
    bell: Arc<Bell>,
    done: Vec<Done>,
    completions: Vec<bdev::Completion>,
    /// How often foreign memory was found to be gone, at the last look.
    faults_seen: u32,
    /// Something waits for more than an event.
    waiting: bool,
    stopping: bool,
}

impl Group {
    pub(crate) fn new(core: &Core, shared: Shared, messages: Receiver<Message>, bell: Arc<Bell>) -> Group {
        Group {
            index: core.index(),
            pool: core.pool().clone(),
            shared,
            devices: Devices::default(),
            endpoints: Slab::with_capacity(ENDPOINTS_MAX),
            used: 0,
            events: core.events().client(),
            messages,
            bell,
            done: Vec::new(),
            completions: Vec::with_capacity(256),
            faults_seen: memory::foreign_faults(),
            waiting: false,
            stopping: false,
        }
    }

    fn take_messages(&mut self, core: &Core, now_ns: u64) -> usize {
        let mut count = 0;
        while let Some(message) = self.messages.receive() {
            count += 1;
            match message {
                Message::Apply(picture, answer) => {
                    self.apply(core, picture, now_ns);
                    let _ = answer.send(());
                }
                Message::Listen { directory, nqn, portid, answer } => {
                    let _ = answer.send(self.listen(directory, nqn, portid));
                }
                Message::Unlisten { portid, answer } => {
                    self.unlisten(Some(portid), now_ns);
                    let _ = answer.send(());
                }
                Message::Look => {}
                Message::Report(answer) => {
                    let _ = answer.send(self.report());
                }
                Message::Inject { portid, fault, answer } => {
                    let _ = answer.send(self.inject(portid, fault));
                }
            }
        }
        count
    }

    /// The bell rang: controllers have notifications, commands may be answered, others want to be waited for.
    #[cold]
    fn rung(&mut self, drains: &[Drain], now_ns: u64) {
        for slot in self.slots() {
            let Some(endpoint) = self.endpoints.get_mut(slot) else { continue };
            let Some(session) = &mut endpoint.session else { continue };
            session.function.drain(drains);
            if !session.ended {
                session.function.unpark();
                session.function.tell(Event::Bell, now_ns);
            }
        }
    }

    fn listen(&mut self, directory: String, nqn: Nqn, portid: u16) -> std::io::Result<()> {
        let listening = Listening::bind(&directory)?;
        let endpoint = Endpoint {
            directory,
            nqn,
            portid,
            listening: Some(listening),
            watch: None,
            session: None,
            session_watch: None,
            knocked: false,
        };
        let inserted = self.endpoints.insert(endpoint);
        let slot = inserted.map_err(|_| std::io::Error::from(std::io::ErrorKind::QuotaExceeded))?;
        self.used = self.used.max(slot.index() + 1);
        let Some(endpoint) = self.endpoints.get_mut(slot) else { return Ok(()) };
        let Some(listening) = &endpoint.listening else { return Ok(()) };
        match self.events.watch(listening.as_fd(), Interest::READABLE, event(slot, LISTENER)) {
            Ok(watch) => endpoint.watch = Some(watch),
            Err(error) => {
                self.endpoints.remove(slot);
                return Err(error);
            }
        }
        Ok(())
    }

    /// Stops listening on a port, or on all. Clients are asked to leave, and then made to.
    fn unlisten(&mut self, portid: Option<u16>, now_ns: u64) {
        for slot in self.slots() {
            let Some(endpoint) = self.endpoints.get_mut(slot) else { continue };
            if portid.is_some_and(|portid| portid != endpoint.portid) {
                continue;
            }
            if let Some(watch) = endpoint.watch.take() {
                self.events.unwatch(watch);
            }
            endpoint.listening = None;
            if let Some(session) = endpoint.session.as_mut().filter(|session| !session.ended) {
                session.function.leave(now_ns);
            }
            self.part(slot, now_ns);
        }
    }

    /// Is done with a client that leaves, if what it had under way is answered.
    fn part(&mut self, slot: Slot, now_ns: u64) {
        let Some(endpoint) = self.endpoints.get_mut(slot) else { return };
        match &endpoint.session {
            Some(session) if !session.ended && session.function.is_over(now_ns) => self.end(slot, None),
            _ => self.reap(slot),
        }
    }

    fn slots(&self) -> Vec<Slot> {
        self.endpoints.iter().map(|(slot, _)| slot).collect()
    }

    /// Is done with a client, but for what devices have of it.
    fn end(&mut self, slot: Slot, why: Option<End>) {
        let Some(endpoint) = self.endpoints.get_mut(slot) else { return };
        if let Some(watch) = endpoint.session_watch.take() {
            self.events.unwatch(watch);
        }
        if let Some(session) = &mut endpoint.session
            && !session.ended
        {
            if let Some(why) = why.filter(|why| *why != End::Gone) {
                eprintln!("nvmf: vfio-user {}: {why}", endpoint.directory);
            }
            session.ended = true;
            session.function.disconnect();
        }
        self.reap(slot);
    }

    /// Lets go of a client that devices have nothing of, and of an endpoint that nobody listens on.
    fn reap(&mut self, slot: Slot) {
        let Some(endpoint) = self.endpoints.get_mut(slot) else { return };
        if endpoint.session.as_ref().is_some_and(Session::is_done) {
            // Its descriptors are closed, which the client sees.
            endpoint.session = None;
            // Whoever has knocked meanwhile is let in.
            endpoint.knocked = true;
        }
        if endpoint.session.is_none() && endpoint.listening.is_none() {
            self.endpoints.remove(slot);
        }
    }

    fn apply(&mut self, core: &Core, picture: Arc<Picture>, now_ns: u64) {
        self.devices.apply(core, &picture);
        self.shared.picture = picture;
        for slot in self.slots() {
            let Some(endpoint) = self.endpoints.get_mut(slot) else { continue };
            let Some(session) = endpoint.session.as_mut().filter(|session| !session.ended) else { continue };
            session.function.apply(&self.shared, now_ns);
            self.part(slot, now_ns);
        }
    }

    fn report(&self) -> Vec<Report> {
        let one = |endpoint: &Endpoint| {
            let session = endpoint.session.as_ref().filter(|session| !session.ended)?;
            let association = session.function.association();
            Some(Report {
                group: self.index,
                directory: endpoint.directory.clone(),
                subnqn: association.subnqn().clone(),
                cntlid: association.cntlid(),
                queues: session.function.queues().collect(),
            })
        };
        self.endpoints.iter().filter_map(|(_, endpoint)| one(endpoint)).collect()
    }

    fn inject(&mut self, portid: u16, fault: Fault) -> bool {
        let found = self.endpoints.iter().find(|(_, endpoint)| endpoint.portid == portid);
        let Some(slot) = found.map(|(slot, _)| slot) else { return false };
        let session = self.endpoints.get_mut(slot).and_then(|endpoint| endpoint.session.as_mut());
        let Some(session) = session.filter(|session| !session.ended) else { return false };
        let function = &mut session.function;
        match fault {
            Fault::Fatal => function.fail(),
            Fault::DropCompletions(count) => function.faults.drop_completions = count,
            Fault::Gone => function.faults.gone = true,
            Fault::Stall(qid) => function.faults.stalled = Some(qid),
            Fault::Disconnect => self.end(slot, None),
            Fault::None => function.faults = Faults::default(),
        }
        true
    }

    /// Lets the next client in, if the last has gone.
    fn accept(&mut self, slot: Slot, now_ns: u64) {
        let Some(endpoint) = self.endpoints.get_mut(slot) else { return };
        if self.stopping || endpoint.session.is_some() {
            return;
        }
        let Some(stream) = endpoint.listening.as_ref().and_then(Listening::accept) else {
            endpoint.knocked = false;
            return;
        };
        match plug(&self.shared, endpoint, now_ns) {
            Ok(function) => self.admit(slot, stream, function),
            Err(why) => eprintln!("nvmf: vfio-user {}: a client is turned away: {why}", endpoint.directory),
        }
    }

    fn admit(&mut self, slot: Slot, stream: UnixStream, function: Function) {
        let Some(endpoint) = self.endpoints.get_mut(slot) else { return };
        let session = Session::new(stream, function);
        match self.events.watch(session.stream().as_fd(), Interest::BOTH, event(slot, CLIENT)) {
            Ok(watch) => {
                endpoint.session_watch = Some(watch);
                endpoint.session = Some(session);
            }
            Err(error) => {
                eprintln!("nvmf: vfio-user {}: a client is turned away: {error}", endpoint.directory)
            }
        }
    }

    /// Sees what has happened to sockets.
    fn take_events(&mut self) -> usize {
        let mut done = std::mem::take(&mut self.done);
        let count = self.events.reap(&mut done);
        for Done { tag, .. } in done.drain(..) {
            let Some(slot) = self.endpoints.slot_at((tag >> 1) as u32) else { continue };
            let Some(endpoint) = self.endpoints.get_mut(slot) else { continue };
            if tag & 1 == LISTENER {
                endpoint.knocked = true;
            } else if let Some(session) = &mut endpoint.session {
                session.readable = true;
            }
        }
        self.done = done;
        count
    }

    /// Messages, and commands.
    fn serve(&mut self, slot: Slot, now_ns: u64) -> usize {
        let Some(endpoint) = self.endpoints.get_mut(slot) else { return 0 };
        let Some(session) = &mut endpoint.session else {
            if endpoint.knocked {
                self.accept(slot, now_ns);
                return 1;
            }
            return 0;
        };
        if session.ended {
            return 0;
        }
        let mut lent = Lent {
            pool: &self.pool,
            devices: &mut self.devices,
            shared: &self.shared,
            now_ns,
            tag_base: u64::from(slot.index()) << 48,
            flow: slot.index() as u16,
        };
        let mut count = 0;
        let mut outcome = Ok(0);
        if session.readable {
            outcome = session.receive(&mut lent);
        }
        if session.function.has_copies() {
            session.function.go_on(&mut lent);
        }
        if session.function.is_drained() && session.function.is_waiting() {
            session.function.serve_aside(&mut lent);
        }
        if session.function.is_running() && session.function.is_drained() && !session.function.faults.gone {
            count += session.function.fetch(&mut lent);
        }
        match outcome {
            Ok(messages) => count += messages,
            Err(end) => self.end(slot, Some(end)),
        }
        count
    }

    /// Hands batches to devices and takes back what completed.
    #[inline]
    fn drive_devices(&mut self) -> usize {
        if self.devices.are_idle() {
            return 0;
        }
        let mut completions = std::mem::take(&mut self.completions);
        self.devices.drive(&mut completions);
        let count = completions.len();
        // A run of one endpoint's at a time: mostly, there is one.
        let whose = |completion: &bdev::Completion| completion.tag().0 >> 48;
        for run in completions.chunk_by(|one, next| whose(one) == whose(next)) {
            if let Some(session) = session_at(&mut self.endpoints, whose(&run[0])) {
                session.function.complete_direct(run);
            }
        }
        // Those are done with; buffers that were lent are given back.
        completions.retain(|completion| !Function::is_direct(completion));
        for completion in completions.drain(..) {
            if let Some(session) = session_at(&mut self.endpoints, whose(&completion)) {
                session.function.complete(completion);
            }
        }
        self.completions = completions;
        count
    }

    /// Interrupts, and answers that waited for devices.
    fn finish(&mut self, slot: Slot, now_ns: u64) -> usize {
        let Some(endpoint) = self.endpoints.get_mut(slot) else { return 0 };
        let Some(session) = &mut endpoint.session else { return 0 };
        if session.ended {
            self.reap(slot);
            return 0;
        }
        self.waiting |= session.function.unhold();
        session.function.interrupt();
        if session.function.deadline().is_some_and(|deadline| deadline <= now_ns) {
            session.function.tell(Event::Tick, now_ns);
        }
        self.waiting |= session.function.is_waiting();
        let mut count = 0;
        if session.is_pending() {
            match session.settle() {
                Ok(settled) => count += usize::from(settled),
                Err(end) => {
                    self.end(slot, Some(end));
                    return 1;
                }
            }
        }
        if session.function.is_over(now_ns) {
            self.end(slot, None);
        }
        count
    }

    /// Ends clients that took memory away without a word.
    #[cold]
    fn search_poisoned(&mut self) {
        for slot in self.slots() {
            let session = self.endpoints.get_mut(slot).and_then(|endpoint| endpoint.session.as_ref());
            if session.is_some_and(|session| !session.ended && session.function.is_poisoned()) {
                self.end(slot, Some(End::Garbage("memory that it shared has been taken away")));
            }
        }
    }

    /// When some client's doorbells are to be looked at again.
    fn look_ns(&self, now_ns: u64) -> Option<u64> {
        let sessions = self.endpoints.iter().filter_map(|(_, endpoint)| endpoint.session.as_ref());
        let running = sessions.filter(|session| !session.ended && session.function.is_running());
        let idle_ns = running.map(|session| now_ns.saturating_sub(session.function.last_ns)).min()?;
        // The next command waits for an eighth of the time that none came, at most.
        Some(now_ns + (idle_ns / 8).min(LOOK_NS_MAX))
    }
}

/// The client that a request's tag names.
fn session_at(endpoints: &mut Slab<Endpoint>, index: u64) -> Option<&mut Session> {
    let slot = endpoints.slot_at(index as u32)?;
    endpoints.get_mut(slot)?.session.as_mut()
}

const LISTENER: u64 = 0;
const CLIENT: u64 = 1;

fn event(slot: Slot, what: u64) -> u64 {
    u64::from(slot.index()) << 1 | what
}

/// Gives a client a controller, as if it had sent a Connect command.
fn plug(shared: &Shared, endpoint: &Endpoint, now_ns: u64) -> Result<Function, String> {
    let limits = &shared.limits.controller;
    let sqe = Connect {
        record_format: 0,
        qid: 0,
        queue_entries: limits.admin_queue_entries_max,
        attributes: Default::default(),
        kato_ms: 0,
    }
    .to_sqe();
    let hostnqn = super::host_of(&endpoint.directory);
    let connect = ConnectData {
        host_id: *super::host_uuid(&endpoint.directory).as_bytes(),
        cntlid: wire_nvme::fabrics::CNTLID_DYNAMIC,
        subnqn: endpoint.nqn.clone(),
        hostnqn: hostnqn.clone(),
    };
    let mut data = [0; CONNECT_DATA_SIZE];
    connect.encode(&mut data);
    let address = TransportAddress {
        trtype: TransportType::IntraHost,
        adrfam: AddressFamily::IntraHost,
        traddr: endpoint.directory.clone(),
        trsvcid: "0".to_owned(),
    };
    let place = controller::Place {
        directory: &shared.directory,
        limits,
        port: controller::Port { portid: endpoint.portid, address },
    };
    let connected = controller::connect(&sqe, &data, &place, |nqn| shared.picture.subsystem(nqn));
    match connected {
        Ok(ConnectOk::Admin(admin)) => {
            let function = Function::new(admin, shared, endpoint.portid, now_ns);
            function.map_err(|errno| format!("no memory for its doorbells: {errno}"))
        }
        Ok(ConnectOk::Io(_)) => Err("it is an I/O queue".into()),
        Err(error) => Err(format!("{} (it counts as host {hostnqn})", error.status)),
    }
}

impl Turns for Group {
    const NAME: &'static str = "nvmf_vfio_user";

    fn turn(&mut self, core: &Core, now_ns: u64) -> usize {
        let mut count = self.take_events();
        if !self.messages.is_empty() {
            count += self.take_messages(core, now_ns);
        }
        if let Some(drains) = self.bell.take() {
            self.rung(&drains, now_ns);
            count += 1;
        }
        self.waiting = false;
        for index in 0..self.used {
            if let Some(slot) = self.endpoints.slot_at(index) {
                count += self.serve(slot, now_ns);
            }
        }
        count += self.drive_devices();
        for index in 0..self.used {
            if let Some(slot) = self.endpoints.slot_at(index) {
                count += self.finish(slot, now_ns);
            }
        }
        let faults = memory::foreign_faults();
        if faults != self.faults_seen {
            self.faults_seen = faults;
            self.search_poisoned();
        }
        count
    }

    fn deadline(&self) -> Option<u64> {
        let mut pressing = !self.messages.is_empty();
        let mut timer = None;
        for (_, endpoint) in self.endpoints.iter() {
            let session = endpoint.session.as_ref();
            pressing |= endpoint.knocked && session.is_none();
            if let Some(session) = session.filter(|session| !session.ended) {
                pressing |= session.readable && !session.is_pending();
                pressing |= session.function.is_going();
                timer = [timer, session.function.deadline()].into_iter().flatten().min();
            }
        }
        if pressing {
            return Some(0);
        }
        let now_ns = sys::clock::now_ns();
        let look = if self.shared.limits.doorbells_trapped { None } else { self.look_ns(now_ns) };
        let memory = self.waiting.then(|| now_ns + MEMORY_RETRY_NS);
        [self.devices.deadline(), look, memory, timer].into_iter().flatten().min()
    }

    fn shutdown(&mut self, now_ns: u64) -> Shutdown {
        self.stopping = true;
        self.unlisten(None, now_ns);
        if self.endpoints.is_empty() { Shutdown::Done } else { Shutdown::Draining }
    }
}
