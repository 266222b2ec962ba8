//! The bases of a device that has several, which come and go while it lives.

use std::cell::RefCell;
use std::rc::{Rc, Weak};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use block_io::Status;
use reactor::Core;

use super::idle_channels::{IdleChannels, ReleaseIdle, ReleaseSignal};
use super::{BaseBdev, BaseChannel};
use crate::{BdevError, BlockDevice, Completion, Request};

/// Most places of a set: they are bits of a word.
pub const PLACES_MAX: usize = 64;

/// The bases of one device, in numbered places, some of which may be empty.
///
/// The control plane [puts](Self::insert) bases in and [takes](Self::remove) them out. [Channels](Self::open)
/// on every core follow at their next submit or poll, for which their cores are woken: they open the new base
/// and close the old one once its I/O in flight has completed. A channel that is idle, whose user may not
/// poll it, closes the old base all the same. Where nothing has changed that costs them a load.
pub struct BaseSet {
    /// Changes with each base that comes or goes; changed with the lock of the table.
    version: AtomicU64,
    table: Mutex<BaseTable>,
}

struct BaseTable {
    bases: Vec<Option<Arc<BaseBdev>>>,
    /// What wakes the cores of open channels, and their tasks for idle ones, by the channel's number.
    wakers: Vec<(u64, os::Waker, Arc<ReleaseSignal>)>,
    last_channel: u64,
}

impl BaseSet {
    /// A set of empty places, [`PLACES_MAX`] at most.
    ///
    /// # Panics
    /// If there are more, or none.
    pub fn new(places: usize) -> Arc<BaseSet> {
        assert!((1..=PLACES_MAX).contains(&places), "a set has 1 to {PLACES_MAX} places, not {places}");
        let bases = (0..places).map(|_| None).collect();
        let table = BaseTable { bases, wakers: Vec::new(), last_channel: 0 };
        Arc::new(BaseSet { version: AtomicU64::new(1), table: Mutex::new(table) })
    }

    /// Fills an empty place.
    ///
    /// # Errors
    /// Returns the base if the place has one.
    pub fn insert(&self, place: usize, base: BaseBdev) -> Result<Arc<BaseBdev>, BaseBdev> {
        let mut table = self.lock();
        if table.bases[place].is_some() {
            return Err(base);
        }
        let base = Arc::new(base);
        table.bases[place] = Some(base.clone());
        self.publish(&table);
        Ok(base)
    }

    /// Empties a place. Its base is closed when no channel has I/O in flight to it.
    pub fn remove(&self, place: usize) -> Option<Arc<BaseBdev>> {
        let mut table = self.lock();
        let base = table.bases[place].take()?;
        self.publish(&table);
        table.wakers.iter().for_each(|(.., signal)| signal.wake());
        drop(table);
        base.release();
        Some(base)
    }

    /// Releases all bases: when the device is closed ([`Bdev::on_closed`](crate::Bdev::on_closed)).
    pub fn release(&self) {
        for place in 0..self.places() {
            self.remove(place);
        }
    }

    /// Wakes the cores of all channels, which are polled then: for a module that has changed what theirs wait
    /// for.
    pub fn notify(&self) {
        self.publish(&self.lock());
    }

    /// Number of places, empty ones included.
    pub fn places(&self) -> usize {
        self.lock().bases.len()
    }

    /// The base in a place.
    pub fn base(&self, place: usize) -> Option<Arc<BaseBdev>> {
        self.lock().bases[place].clone()
    }

    /// The bases that are there.
    pub fn bases(&self) -> Vec<Arc<BaseBdev>> {
        self.lock().bases.iter().flatten().cloned().collect()
    }

    /// The place of a device, which is another one than a later device of the same name.
    pub fn place_of(&self, device: &BlockDevice) -> Option<usize> {
        let is_device = |base: &Option<Arc<BaseBdev>>| {
            base.as_ref().is_some_and(|base| std::ptr::eq(Arc::as_ptr(base.device()), device))
        };
        self.lock().bases.iter().position(is_device)
    }

    /// Opens channels to all bases on this core.
    ///
    /// # Errors
    /// No base can be opened; that of the first.
    pub fn open(self: &Arc<Self>, core: &Core) -> Result<BaseChannels, BdevError> {
        let open = (0..self.places()).map(|_| OpenPlace::default()).collect();
        let open = Rc::new(RefCell::new(OpenPlaces { set: self.clone(), places: open }));
        let weak = Rc::downgrade(&open);
        let signal = IdleChannels::add(core, weak as Weak<RefCell<dyn ReleaseIdle>>);
        let mut table = self.lock();
        table.last_channel += 1;
        let id = table.last_channel;
        table.wakers.push((id, core.event_loop().waker(), signal));
        drop(table);
        let mut channels = BaseChannels {
            open,
            set: self.clone(),
            id,
            core: core.clone(),
            version: 0,
            present: 0,
            closing: Vec::new(),
            refused: Vec::new(),
        };
        match channels.follow() {
            Some(error) if channels.open.borrow().places.iter().all(|place| place.channel.is_none()) => {
                Err(error)
            }
            _ => Ok(channels),
        }
    }

    fn publish(&self, table: &BaseTable) {
        self.version.fetch_add(1, Ordering::Release);
        table.wakers.iter().for_each(|(_, waker, _)| waker.wake());
    }

    fn lock(&self) -> MutexGuard<'_, BaseTable> {
        // Each change is whole before anything can panic.
        sync::lock(&self.table)
    }
}

/// The channels of a [`BaseSet`] on one core.
///
/// Requests are [pushed](Self::push) to a place, and reach its base in the next [`submit`](Self::submit) or
/// [`poll`](Self::poll).
pub struct BaseChannels {
    set: Arc<BaseSet>,
    id: u64,
    core: Core,
    /// The version of the set that is applied.
    version: u64,
    /// Bits of the places that have a base.
    present: u64,
    open: Rc<RefCell<OpenPlaces>>,
    /// Of bases that have left with I/O in flight.
    closing: Vec<ClosingPlace>,
    /// Of requests to places without a channel, by place.
    refused: Vec<(usize, Completion)>,
}

/// The channel of a base that has left its place.
struct ClosingPlace {
    place: usize,
    first_lba: u64,
    channel: BaseChannel,
}

struct OpenPlaces {
    set: Arc<BaseSet>,
    places: Vec<OpenPlace>,
}

impl ReleaseIdle for OpenPlaces {
    /// The rest of the change is for the next submit or poll, which have it to do still.
    fn release_idle(&mut self) {
        let bases = self.set.lock().bases.clone();
        for (open, base) in self.places.iter_mut().zip(bases) {
            let has_left = open.base.as_ref().map(Arc::as_ptr) != base.as_ref().map(Arc::as_ptr);
            if has_left && open.channel.as_ref().is_some_and(BaseChannel::is_idle) {
                (open.channel, open.base) = (None, None);
            }
        }
    }
}

#[derive(Default)]
struct OpenPlace {
    base: Option<Arc<BaseBdev>>,
    /// That of the base.
    first_lba: u64,
    /// `None` if it cannot be opened, too.
    channel: Option<BaseChannel>,
}

impl OpenPlace {
    /// Returns the request if there is no channel.
    #[inline]
    fn push(&mut self, mut request: Request) -> Result<(), Request> {
        let Some(channel) = &mut self.channel else { return Err(request) };
        // Not used by a flush, whose value may be anything.
        request.lba = request.lba.wrapping_add(self.first_lba);
        channel.push(request);
        Ok(())
    }
}

impl BaseChannels {
    /// Applies what has changed in the set, as [`submit`](Self::submit) and [`poll`](Self::poll) do: before
    /// [`present`](Self::present).
    #[inline]
    pub fn sync(&mut self) {
        if self.set.version.load(Ordering::Acquire) != self.version {
            self.follow();
        }
    }

    /// Returns the first error of opening a base. It is logged, as the module learns of it by failed I/O
    /// only.
    #[cold]
    fn follow(&mut self) -> Option<BdevError> {
        let table = self.set.lock();
        self.version = self.set.version.load(Ordering::Acquire);
        let bases = table.bases.clone();
        drop(table);
        let mut first_error = None;
        self.present = 0;
        let mut open = self.open.borrow_mut();
        for (place, (open, base)) in open.places.iter_mut().zip(bases).enumerate() {
            self.present |= u64::from(base.is_some()) << place;
            if open.base.as_ref().map(Arc::as_ptr) == base.as_ref().map(Arc::as_ptr) {
                continue;
            }
            let first_lba = open.first_lba;
            let closing = open.channel.take().filter(|channel| !channel.is_idle());
            self.closing.extend(closing.map(|channel| ClosingPlace { place, first_lba, channel }));
            open.first_lba = base.as_ref().map_or(0, |base| base.first_lba());
            open.base = base;
            match open.base.as_ref().map(|base| base.channel(&self.core)) {
                None => {}
                Some(Ok(channel)) => open.channel = Some(BaseChannel::new(channel)),
                Some(Err(error)) => {
                    let core = self.core.index();
                    log::warn!(target: "bdev", "core {core} has no channel to a base: {error}");
                    first_error.get_or_insert(error);
                }
            }
        }
        first_error
    }

    /// The places that have a base, as bits, whether or not a channel could be opened.
    pub fn present(&self) -> u64 {
        self.present
    }

    /// Adds a request for the base in a place, whose block counts from the
    /// [first](BaseBdev::first_lba) of its data. Without a channel there it completes with
    /// [`Status::INTERNAL_PATH_ERROR`].
    #[inline]
    pub fn push(&mut self, place: usize, request: Request) {
        let pushed = self.open.borrow_mut().places[place].push(request);
        if let Err(request) = pushed {
            self.push_after_sync(place, request);
        }
    }

    /// To a place that had no channel when the set was looked at last.
    #[cold]
    fn push_after_sync(&mut self, place: usize, request: Request) {
        self.sync();
        let pushed = self.open.borrow_mut().places[place].push(request);
        if let Err(request) = pushed {
            self.refused.push((place, request.complete(Status::INTERNAL_PATH_ERROR)));
        }
    }

    /// Submits what the bases have room for.
    pub fn submit(&mut self) {
        self.sync();
        let places = &mut self.open.borrow_mut().places;
        places.iter_mut().filter_map(|place| place.channel.as_mut()).for_each(BaseChannel::submit);
    }

    /// Submits waiting requests, and appends the completions of all bases. Their requests are as they were
    /// pushed.
    pub fn poll(&mut self, sink: &mut Vec<Completion>) {
        self.poll_places(sink, |_, _| {});
    }

    /// As [`poll`](Self::poll), and calls `each` with each place that has completed some, and with these.
    #[inline]
    pub fn poll_places(
        &mut self,
        sink: &mut Vec<Completion>,
        mut each: impl FnMut(usize, &mut [Completion]),
    ) {
        self.sync();
        if !self.refused.is_empty() {
            for (place, completion) in self.refused.drain(..) {
                sink.push(completion);
                each(place, sink.last_mut().map_or(&mut [], std::slice::from_mut));
            }
        }
        let mut poll = |place, first_lba: u64, channel: &mut BaseChannel| {
            let before = sink.len();
            channel.poll_into(sink);
            let completions = &mut sink[before..];
            if first_lba != 0 {
                for completion in &mut *completions {
                    let request = completion.request_mut();
                    request.lba = request.lba.wrapping_sub(first_lba);
                }
            }
            each(place, completions);
        };
        for (place, open) in self.open.borrow_mut().places.iter_mut().enumerate() {
            if let Some(channel) = &mut open.channel {
                poll(place, open.first_lba, channel);
            }
        }
        if !self.closing.is_empty() {
            for ClosingPlace { place, first_lba, channel } in &mut self.closing {
                poll(*place, *first_lba, channel);
            }
            self.closing.retain(|closing| !closing.channel.is_idle());
        }
    }

    /// When [`poll`](Self::poll) must be called next; see [`Channel::deadline`](block_io::Channel::deadline).
    /// Now, if the set has changed.
    pub fn deadline(&self) -> Option<u64> {
        let has_changed = self.set.version.load(Ordering::Acquire) != self.version;
        if has_changed || !self.refused.is_empty() {
            return Some(0);
        }
        let places = &self.open.borrow().places;
        let open = places.iter().filter_map(|place| place.channel.as_ref());
        let closing = self.closing.iter().map(|closing| &closing.channel);
        open.chain(closing).filter_map(BaseChannel::deadline).min()
    }
}

impl Drop for BaseChannels {
    fn drop(&mut self) {
        self.set.lock().wakers.retain(|(id, ..)| *id != self.id);
    }
}
