//! A namespace's ring on one core: the links to its paths, and what shapes requests for them.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use bdev::{Completion, Request};
use memory::Buffer;
use nvme::{Failure, IoQueue, Namespace, OpenError, QueueStats};
use reactor::Core;
use ring::{Op, Status, Tag};
use slots::{Slab, Slot};
use sys::clock::now_ns;

use crate::counts::LinkCounts;
use crate::inject::Faults;
use crate::multipath::{Multipath, PathView};
use crate::path::Path;
use crate::totals::Live;
use crate::view::{ChannelBoard, Join, LinkBoard, PathId, PathState, View};

/// I/Os on one channel: what the layer lets through, and pieces of none more than that.
pub(crate) const DEPTH: u32 = 1024;
/// What Write Zeroes and Dataset Management count to (NVM 1.0, NLB has 16 bits).
const RANGE_BLOCKS_MAX: u32 = 65536;
/// Time between tries to open an I/O queue while the controller itself is there.
const OPEN_DELAY_NS: u64 = 100_000_000;
/// Tries in a row after which the controller is reset.
const OPENS_MAX: u32 = 5;
/// Note of a request that came as it is.
const WHOLE: u32 = u32::MAX;

pub(crate) struct Channel {
    core: Core,
    view: Arc<View>,
    seen: u64,
    preferred: Option<PathId>,
    board_id: u64,
    board: Arc<ChannelBoard>,
    machine: Multipath<Buffer>,
    /// By the machine's index.
    links: Vec<Link>,
    by_id: HashMap<PathId, usize>,
    pieces: Slab<Pieces>,
    /// Pieces for which there was no buffer.
    starved: Vec<Slot>,
    sink: Vec<Completion>,
    done: Vec<Completion>,
    block_size: u32,
}

/// The way to one path.
struct Link {
    state: PathState,
    way: Way,
    /// The connection that it is for, or was for last.
    epoch: u64,
    failed_opens: u32,
    ana_readings: u64,
    /// The control plane knows that the ANA state is stale.
    told_stale: bool,
    removed: bool,
    counts: Option<Arc<LinkCounts>>,
    faults: Faults,
    /// Where its queue's counts are shown, while there is one.
    live: Option<Arc<Live>>,
}

enum Way {
    None,
    Opening(Rc<RefCell<Option<Result<Opened, OpenError>>>>, Rc<Latch>),
    Open(Opened),
    /// Not to be used any more; it has memory until the driver's reset or detaching ends its commands. And whether it
    /// failed by itself.
    Closing(Opened, bool),
    /// To be opened again at that time.
    Later(u64),
}

/// Ends a task that nobody waits for any more.
#[derive(Default)]
struct Latch(std::cell::Cell<bool>);

enum Opened {
    Tcp(Box<IoQueue>),
    Direct(Box<Namespace>),
}

impl Opened {
    fn stats(&self) -> QueueStats {
        match self {
            Opened::Tcp(queue) => queue.stats(),
            Opened::Direct(namespace) => namespace.stats(),
        }
    }

    fn failure(&self) -> Option<Failure> {
        match self {
            Opened::Tcp(queue) => queue.failure(),
            Opened::Direct(namespace) => namespace.failure(),
        }
    }

    #[inline]
    fn submit(&mut self, batch: &mut Vec<Request>) {
        match self {
            Opened::Tcp(queue) => ring::Channel::submit(&mut **queue, batch),
            Opened::Direct(namespace) => ring::Channel::submit(&mut **namespace, batch),
        }
    }

    #[inline]
    fn poll(&mut self, sink: &mut Vec<Completion>) -> usize {
        match self {
            Opened::Tcp(queue) => ring::Channel::poll(&mut **queue, sink),
            Opened::Direct(namespace) => ring::Channel::poll(&mut **namespace, sink),
        }
    }

    fn deadline(&self) -> Option<u64> {
        match self {
            Opened::Tcp(queue) => ring::Channel::deadline(&**queue),
            Opened::Direct(namespace) => ring::Channel::deadline(&**namespace),
        }
    }
}

/// A request that is done a piece at a time: one that is longer than a command may be, or whose buffer no
/// device can be shown. Its pieces go one after the other.
struct Pieces {
    request: Request,
    done_blocks: u32,
    piece_blocks: u32,
}

impl Channel {
    pub(crate) fn new(core: &Core, view: &Arc<View>, block_size: u32, retries_max: u16) -> Channel {
        let (board_id, board) = view.join_board(core);
        let mut channel = Channel {
            core: core.clone(),
            view: view.clone(),
            seen: 0,
            preferred: None,
            board_id,
            board,
            machine: Multipath::new(view.policy(), DEPTH, retries_max),
            links: Vec::new(),
            by_id: HashMap::new(),
            pieces: Slab::with_capacity(DEPTH),
            starved: Vec::new(),
            sink: Vec::new(),
            done: Vec::new(),
            block_size,
        };
        channel.look(now_ns());
        channel
    }

    /// Takes over what the control plane says of the paths.
    #[cold]
    fn look(&mut self, now_ns: u64) {
        let (version, paths, policy, preferred) = self.view.look();
        self.seen = version;
        self.preferred = preferred;
        self.machine.set_policy(policy);
        for link in &mut self.links {
            link.removed = !paths.iter().any(|path| path.id == link.state.id);
        }
        for state in paths {
            let index = match self.by_id.get(&state.id) {
                Some(index) => *index,
                None => self.add_link(&state),
            };
            self.links[index].state = state;
        }
        for index in 0..self.links.len() {
            self.adjust(index, now_ns);
        }
        self.publish();
    }

    /// A link to a path that is new, in the place of one that is gone where there is one.
    fn add_link(&mut self, state: &PathState) -> usize {
        let view = PathView { connected: false, ana: state.ana, waits_until_ns: u64::MAX, preferred: false };
        let link = Link {
            state: state.clone(),
            way: Way::None,
            epoch: 0,
            failed_opens: 0,
            ana_readings: 0,
            told_stale: false,
            removed: false,
            counts: state.path.counts_io().then(Arc::default),
            faults: Faults::new(&state.path.orders),
            live: None,
        };
        let gone = |index: &usize| {
            let link = &self.links[*index];
            link.removed && matches!(link.way, Way::None) && self.machine.in_flight(*index) == 0
        };
        let index = match (0..self.links.len()).find(gone) {
            Some(index) => {
                self.machine.replace_path(index, view);
                self.by_id.remove(&self.links[index].state.id);
                self.links[index] = link;
                index
            }
            None => {
                self.links.push(link);
                self.machine.add_path(view)
            }
        };
        self.by_id.insert(state.id, index);
        index
    }

    /// Makes a link what the control plane says that it is to be.
    fn adjust(&mut self, index: usize, now_ns: u64) {
        let link = &mut self.links[index];
        let wanted = link.state.join.as_ref().filter(|_| !link.removed).map(|(epoch, _)| *epoch);
        if wanted != Some(link.epoch) {
            self.close(index, now_ns);
        }
        let link = &mut self.links[index];
        if let (Some(epoch), Way::None) = (wanted, &link.way) {
            if epoch != link.epoch {
                link.failed_opens = 0;
            }
            self.open(index);
        }
        let link = &mut self.links[index];
        link.faults.follow(&link.state.path.orders);
        if link.ana_readings != link.state.ana_readings {
            link.ana_readings = link.state.ana_readings;
            link.told_stale = false;
            self.machine.refreshed(index, now_ns);
        }
        self.tell_machine(index, now_ns);
    }

    fn tell_machine(&mut self, index: usize, now_ns: u64) {
        let link = &self.links[index];
        let view = PathView {
            connected: matches!(link.way, Way::Open(_)),
            ana: link.state.ana,
            waits_until_ns: if link.removed { 0 } else { link.state.waits_until_ns },
            preferred: self.preferred == Some(link.state.id),
        };
        self.machine.set_path(index, view, now_ns);
    }

    fn open(&mut self, index: usize) {
        let link = &mut self.links[index];
        let Some((epoch, join)) = link.state.join.clone() else { return };
        link.epoch = epoch;
        let (arrival, latch) = (Rc::new(RefCell::new(None)), Rc::new(Latch::default()));
        let (put, over) = (arrival.clone(), latch.clone());
        let (core, nsid) = (self.core.clone(), self.view.nsid);
        let path = link.state.path.clone();
        let waker = self.core.events().waker();
        let spawned = self.core.spawn(async move {
            let opened = open_link(&core, &path, join, nsid).await;
            if !over.0.get() {
                *put.borrow_mut() = Some(opened);
                // The poller that waits for it may be asleep by now.
                waker.wake();
            }
        });
        link.way = if spawned { Way::Opening(arrival, latch) } else { Way::Later(now_ns() + OPEN_DELAY_NS) };
    }

    /// Ends a link; what it had in flight goes elsewhere.
    fn close(&mut self, index: usize, now_ns: u64) {
        match std::mem::replace(&mut self.links[index].way, Way::None) {
            Way::Opening(_, latch) => latch.0.set(true),
            Way::Open(opened) => self.begin_closing(index, opened, false, now_ns),
            closing @ Way::Closing(..) => self.links[index].way = closing,
            Way::None | Way::Later(_) => {}
        }
    }

    /// Uses a queue no more. What was not sent goes elsewhere at once, everything else when it has come back.
    fn begin_closing(&mut self, index: usize, mut opened: Opened, failed: bool, now_ns: u64) {
        let ana = self.links[index].state.ana;
        let view = PathView { connected: false, ana, waits_until_ns: u64::MAX, preferred: false };
        self.machine.set_path(index, view, now_ns);
        if let Opened::Tcp(queue) = &mut opened {
            queue.fail(Failure::Detached);
        }
        let withheld: Vec<Completion> = self.links[index].faults.end().collect();
        for completion in withheld {
            self.machine.returned(index, completion, now_ns);
        }
        self.links[index].way = Way::Closing(opened, failed);
        self.go_on_closing(index, now_ns);
    }

    /// Takes in what a queue had in flight that is not used any more; whether that was the last of it.
    fn go_on_closing(&mut self, index: usize, now_ns: u64) -> bool {
        let Way::Closing(mut opened, failed) = std::mem::replace(&mut self.links[index].way, Way::None)
        else {
            return false;
        };
        self.reap(index, &mut opened, now_ns);
        if self.machine.in_flight(index) > 0 {
            self.links[index].way = Way::Closing(opened, failed);
            return false;
        }
        if let Some(live) = self.links[index].live.take() {
            self.view.totals.end(&live, &opened.stats());
        }
        if failed {
            self.opening_failed(index, now_ns);
        }
        true
    }

    fn reap(&mut self, index: usize, opened: &mut Opened, now_ns: u64) -> usize {
        let mut sink = std::mem::take(&mut self.sink);
        opened.poll(&mut sink);
        if let Some(counts) = &self.links[index].counts {
            counts.add(&sink, self.block_size);
        }
        let count = sink.len();
        for completion in sink.drain(..) {
            self.machine.returned(index, completion, now_ns);
        }
        self.sink = sink;
        count
    }

    /// Looks at links that are on their way, failed, or wait for their time.
    fn tend(&mut self, now_ns: u64) {
        for index in 0..self.links.len() {
            let link = &mut self.links[index];
            match &mut link.way {
                Way::Opening(arrival, _) => {
                    let Some(outcome) = arrival.borrow_mut().take() else { continue };
                    match outcome {
                        Ok(opened) => {
                            let trtype = link.state.path.id().trtype();
                            link.live = Some(self.view.totals.begin(self.board.core, trtype));
                            (link.failed_opens, link.way) = (0, Way::Open(opened));
                        }
                        Err(_) => self.opening_failed(index, now_ns),
                    }
                }
                Way::Open(opened) if opened.failure().is_some() => {
                    let Way::Open(opened) = std::mem::replace(&mut link.way, Way::None) else { continue };
                    self.begin_closing(index, opened, true, now_ns);
                }
                Way::Closing(..) => {
                    if !self.go_on_closing(index, now_ns) {
                        continue;
                    }
                    // Another connection may be waiting for its turn.
                    self.adjust(index, now_ns);
                }
                Way::Later(due_ns) if *due_ns <= now_ns => {
                    link.way = Way::None;
                    self.open(index);
                    continue;
                }
                _ => continue,
            }
            self.tell_machine(index, now_ns);
            self.publish();
        }
    }

    fn opening_failed(&mut self, index: usize, now_ns: u64) {
        let link = &mut self.links[index];
        link.failed_opens += 1;
        if link.failed_opens >= OPENS_MAX {
            link.failed_opens = 0;
            link.state.path.complain(link.epoch);
        }
        link.way = Way::Later(now_ns + OPEN_DELAY_NS);
    }

    /// Shows the control plane what the links are like.
    fn publish(&self) {
        let current = self.machine.current();
        let links = self.links.iter().enumerate().filter(|(_, link)| !link.removed);
        let boards = links.map(|(index, link)| LinkBoard {
            id: link.state.id,
            connected: matches!(link.way, Way::Open(_)),
            current: current == Some(index),
            counts: link.counts.clone(),
        });
        *self.board.links() = boards.collect();
        self.board.set_seen(self.seen);
    }

    /// Whether a request can go as it is.
    #[inline]
    fn is_plain(&self, request: &Request, transfer_max_bytes: u32) -> bool {
        match &request.buffer {
            Some(buffer) => buffer.len() as u64 <= u64::from(transfer_max_bytes) && !buffer.is_lent(),
            None => !request.op.has_range() || request.blocks <= RANGE_BLOCKS_MAX,
        }
    }

    /// Begins a request that goes in pieces.
    fn begin(&mut self, request: Request, transfer_max_bytes: u32, now_ns: u64) {
        let piece_blocks = match request.buffer {
            Some(_) => (transfer_max_bytes / self.block_size).max(1),
            None => RANGE_BLOCKS_MAX,
        };
        match self.pieces.insert(Pieces { request, done_blocks: 0, piece_blocks }) {
            Ok(slot) => self.next_piece(slot, now_ns),
            Err(pieces) => self.done.push(pieces.request.complete(Status::INTERNAL_ERROR)),
        }
    }

    fn next_piece(&mut self, slot: Slot, now_ns: u64) {
        let Some(pieces) = self.pieces.get(slot) else { return };
        let whole = &pieces.request;
        let blocks = pieces.piece_blocks.min(whole.blocks - pieces.done_blocks);
        let offset = pieces.done_blocks as usize * self.block_size as usize;
        let bytes = blocks as usize * self.block_size as usize;
        let mut piece = Request::new(Tag(0), whole.op, whole.lba + u64::from(pieces.done_blocks), blocks);
        (piece.flags, piece.flow, piece.issued) = (whole.flags, whole.flow, whole.issued);
        if let Some(data) = &whole.buffer {
            let Some(mut buffer) = self.core.pool().take(bytes) else {
                self.starved.push(slot);
                return;
            };
            if whole.op == Op::Write {
                data.copy_to(offset, buffer.as_mut_slice());
            }
            piece.buffer = Some(buffer);
        }
        self.machine.submit(piece, slot.index(), now_ns);
    }

    fn piece_done(&mut self, note: u32, completion: Completion, now_ns: u64) {
        let Some(slot) = self.pieces.slot_at(note) else { return };
        let status = completion.status();
        let piece = completion.into_request();
        let Some(pieces) = self.pieces.get_mut(slot) else { return };
        if status.is_success() {
            if let (Op::Read, Some(from), Some(to)) = (piece.op, &piece.buffer, &mut pieces.request.buffer) {
                to.copy_from(pieces.done_blocks as usize * self.block_size as usize, from.as_slice());
            }
            pieces.done_blocks += piece.blocks;
            if pieces.done_blocks < pieces.request.blocks {
                drop(piece);
                self.next_piece(slot, now_ns);
                return;
            }
        }
        if let Some(pieces) = self.pieces.remove(slot) {
            self.done.push(pieces.request.complete(status));
        }
    }

    /// Hands links what the machine has for them.
    #[inline]
    fn flush(&mut self, now_ns: u64) {
        for (index, link) in self.links.iter_mut().enumerate() {
            let outgoing = self.machine.outgoing(index);
            if !outgoing.is_empty()
                && let Way::Open(opened) = &mut link.way
            {
                if !link.faults.is_idle() {
                    link.faults.withhold(outgoing, now_ns);
                }
                opened.submit(outgoing);
            }
        }
    }
}

async fn open_link(core: &Core, path: &Path, join: Join, nsid: u32) -> Result<Opened, OpenError> {
    match join {
        Join::Tcp(membership, identify) => {
            let queue = IoQueue::open(core, &membership, nsid, &identify).await?;
            Ok(Opened::Tcp(Box::new(queue)))
        }
        Join::Direct(controller) => {
            let namespace = Namespace::of(&controller, core, nsid, path.driver_options()).await?;
            Ok(Opened::Direct(Box::new(namespace)))
        }
    }
}

impl ring::Channel for Channel {
    type Request = Request;
    type Completion = Completion;

    fn submit(&mut self, batch: &mut Vec<Request>) {
        let now_ns = now_ns();
        // Without I/O nobody may have polled it.
        if self.view.version() != self.seen {
            self.look(now_ns);
        }
        let transfer_max_bytes = self.view.transfer_max_bytes.load(Ordering::Relaxed);
        // Room for every piece that is under way is kept: each has one I/O at a time.
        let room = self.machine.room().saturating_sub(self.starved.len());
        let count = batch.len().min(room);
        for request in batch.drain(..count) {
            if self.is_plain(&request, transfer_max_bytes) {
                self.machine.submit(request, WHOLE, now_ns);
            } else {
                self.begin(request, transfer_max_bytes, now_ns);
            }
        }
        self.flush(now_ns);
    }

    fn poll(&mut self, sink: &mut Vec<Completion>) -> usize {
        let before = sink.len();
        let now_ns = now_ns();
        if self.view.version() != self.seen {
            self.look(now_ns);
        }
        for index in 0..self.links.len() {
            let mut completions = std::mem::take(&mut self.sink);
            let link = &mut self.links[index];
            if let Way::Open(opened) = &mut link.way
                && opened.poll(&mut completions) > 0
                && let Some(live) = &link.live
            {
                live.tell(&opened.stats());
            }
            if !self.links[index].faults.is_idle() {
                self.links[index].faults.alter(&mut completions, now_ns);
            }
            if let Some(counts) = &self.links[index].counts {
                counts.add(&completions, self.block_size);
            }
            for completion in completions.drain(..) {
                let delay_ns = self.links[index].state.path.retry_delay_ns(completion.status());
                self.machine.returned_later(index, completion, delay_ns, now_ns);
            }
            self.sink = completions;
            if self.machine.is_stale(index) && !self.links[index].told_stale {
                self.links[index].told_stale = true;
                self.links[index].state.path.refresh_ana();
            }
        }
        self.tend(now_ns);
        self.machine.dispatch(now_ns);
        for slot in std::mem::take(&mut self.starved) {
            self.next_piece(slot, now_ns);
        }
        loop {
            let mut done = std::mem::take(self.machine.done());
            if done.is_empty() {
                break;
            }
            for (note, completion) in done.drain(..) {
                if note == WHOLE {
                    sink.push(completion);
                } else {
                    self.piece_done(note, completion, now_ns);
                }
            }
            if self.machine.done().is_empty() {
                // Its memory is used again.
                *self.machine.done() = done;
                break;
            }
        }
        sink.append(&mut self.done);
        self.flush(now_ns);
        sink.len() - before
    }

    fn deadline(&self) -> Option<u64> {
        if !self.starved.is_empty() || !self.done.is_empty() || self.view.version() != self.seen {
            return Some(0);
        }
        let links = self.links.iter().filter_map(|link| match &link.way {
            Way::Open(opened) | Way::Closing(opened, _) if opened.failure().is_some() => Some(0),
            Way::Open(opened) | Way::Closing(opened, _) => opened.deadline(),
            Way::Later(due_ns) => Some(*due_ns),
            Way::Opening(arrival, _) => arrival.borrow().is_some().then_some(0),
            Way::None => None,
        });
        let withheld = self.links.iter().filter_map(|link| link.faults.deadline_ns());
        links.chain(withheld).chain(self.machine.deadline_ns()).min()
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        for link in &mut self.links {
            if let Way::Open(opened) | Way::Closing(opened, _) = &link.way
                && let Some(live) = link.live.take()
            {
                self.view.totals.end(&live, &opened.stats());
            }
        }
        self.view.leave_board(self.board_id);
        for link in &self.links {
            if let Way::Opening(_, latch) = &link.way {
                latch.0.set(true);
            }
        }
    }
}
