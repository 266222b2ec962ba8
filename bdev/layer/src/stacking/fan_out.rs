//! One request as several for the bases of a device.

use std::sync::atomic::{AtomicU16, Ordering};

use block_io::{Op, Payload, ProtectedData, Request as BlockRequest, RequestFlags, Status, Tag};
use dma::{Buffer, Data};
use slots::{Slab, Slot};

use super::BaseChannels;
use crate::channel::RESETS_MAX;
use crate::{Completion, Request};

/// The requests of one channel that were made into several, for the channels of its bases.
///
/// [`copy_to`](Self::copy_to) sends a request to one place or several, [`divide`](Self::divide) pieces of its
/// range to places, [`forward`](Self::forward) all of it to one place, and [`pass`](Self::pass) the same
/// without an entry of a table, at the least cost. [`complete`](Self::complete) takes the completions of
/// these children, in any order, and returns the request with its data once the last is there. Which errors
/// matter is the caller's decision: [`FanOutResult::complete`] takes the first, [`retry`](Self::retry) sends
/// the request elsewhere.
///
/// Children have [tags of their own](Self::is_child), and none of the layer's flags. Copies of a write share
/// its data, which can be written again when it comes back; where that cannot be, because it is a part of an
/// allocation, the places get it one after the other. Nothing is copied. Tables have a fixed size and
/// allocate only until they are as full as they ever were; data of many slices and protected data allocate
/// their lists for each child.
pub struct FanOut {
    parents: Slab<Parent>,
    children: Slab<Child>,
    children_max: usize,
    /// Entries of the children that are forwarded requests.
    forwarded: usize,
    /// Bits 63:48 of the tags of children: another value for each of the tables made one after the other, so
    /// that devices on each other rarely have the same.
    tag_prefix: u16,
}

/// The next [`FanOut::tag_prefix`]. Callers rarely use values from the first on.
static TAG_PREFIX: AtomicU16 = AtomicU16::new(0xb000);

/// A part of a request's range, on one place: [`FanOut::divide`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// The place of the base.
    pub place: usize,
    /// First block on the base.
    pub lba: u64,
    /// Number of blocks.
    pub blocks: u32,
}

/// A request whose children have all completed.
#[derive(Debug)]
pub struct FanOutResult {
    /// The request, with its data.
    pub request: Request,
    /// The first error, or success.
    pub status: Status,
    /// Bits of the places where it succeeded.
    pub succeeded: u64,
    /// Bits of the places where it failed.
    pub failed: u64,
}

struct Parent {
    /// Its payload is here or with a child; while children share it, with both.
    request: Request,
    status: Status,
    succeeded: u64,
    failed: u64,
    in_flight: u32,
    /// Places that get the payload when the one before returns it.
    waiting: u64,
    is_shared: bool,
    /// The first of the pieces, which are a list.
    first_piece: Option<Slot>,
}

enum Child {
    Part(ChildPart),
    /// The caller's request itself, which has another block and tag meanwhile.
    Forwarded {
        tag: Tag,
        lba: u64,
        flags: RequestFlags,
        place: u32,
    },
}

struct ChildPart {
    parent: Slot,
    place: usize,
    /// A piece of the parent: it stays until all have completed, and their data is joined.
    is_piece: bool,
    data: Option<Data>,
    next: Option<Slot>,
}

impl FanOut {
    /// For a channel of this [depth](crate::Bdev::depth), with at most `children_max` children of each
    /// request.
    ///
    /// # Panics
    /// If there would be 2^32 - 1 or more.
    pub fn new(depth: u32, children_max: usize) -> FanOut {
        // The layer has resets reach a module beyond its depth.
        let parents = u64::from(depth) + RESETS_MAX as u64;
        let children =
            u32::try_from(parents * children_max as u64).expect("tables of fewer than 2^32 children");
        FanOut {
            parents: Slab::with_capacity(parents as u32),
            children: Slab::with_capacity(children),
            children_max,
            forwarded: 0,
            tag_prefix: TAG_PREFIX.fetch_add(1, Ordering::Relaxed),
        }
    }

    /// Whether a completion with this tag is a child's, for [`complete`](Self::complete), rather than one of
    /// a request that was [passed](Self::pass).
    #[inline]
    pub fn is_child(&self, tag: Tag) -> bool {
        tag.0 >> 48 == u64::from(self.tag_prefix)
    }

    /// The tag of a child: the prefix, 16 bits of its slot's generation, and the slot's index.
    #[inline]
    fn tag(&self, slot: Slot) -> Tag {
        let generation = slot.to_bits() >> 32 & 0xffff;
        Tag(u64::from(self.tag_prefix) << 48 | generation << 32 | u64::from(slot.index()))
    }

    /// The slot of a child's tag.
    #[inline]
    fn slot_of(&self, tag: Tag) -> Option<Slot> {
        let slot = self.children.slot_at(tag.0 as u32)?;
        (self.tag(slot) == tag).then_some(slot)
    }

    /// Number of requests that have not completed.
    pub fn len(&self) -> usize {
        self.parents.len() + self.forwarded
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Sends a request to the `places`, given as bits.
    ///
    /// # Panics
    /// If there are no places, or more than the table was made for.
    pub fn copy_to(&mut self, request: Request, places: u64, channels: &mut BaseChannels) {
        self.send(request, (0, 0), places, channels);
    }

    /// Sends a request to one place as it is, at block `lba` there. It costs an entry of the table of
    /// children; the request and its data are not copied.
    #[inline]
    pub fn forward(&mut self, mut request: Request, place: usize, lba: u64, channels: &mut BaseChannels) {
        let child = Child::Forwarded {
            tag: request.tag,
            lba: request.lba,
            flags: request.flags,
            place: place as u32,
        };
        let slot = self.insert_child(child);
        self.forwarded += 1;
        (request.tag, request.lba) = (self.tag(slot), lba);
        // The base would take it for a request of its own layer.
        request.flags -= RequestFlags::INTERNAL;
        channels.push(place, request);
    }

    /// Sends a request to one place as it is, at block `lba` there, with its own tag if that is none of a
    /// [child](Self::is_child). The caller gives it its block again when it completes; nothing here knows of
    /// it.
    #[inline]
    pub fn pass(&mut self, mut request: Request, place: usize, lba: u64, channels: &mut BaseChannels) {
        if self.is_child(request.tag) || request.flags.contains(RequestFlags::INTERNAL) {
            return self.forward(request, place, lba, channels);
        }
        request.lba = lba;
        channels.push(place, request);
    }

    /// Sends a request to other places than before. The bits of earlier places stay in its result.
    ///
    /// # Panics
    /// As [`copy_to`](Self::copy_to).
    pub fn retry(&mut self, result: FanOutResult, places: u64, channels: &mut BaseChannels) {
        self.send(result.request, (result.succeeded, result.failed), places, channels);
    }

    fn send(&mut self, mut request: Request, earlier: (u64, u64), places: u64, channels: &mut BaseChannels) {
        let count = places.count_ones() as usize;
        assert!((1..=self.children_max).contains(&count), "1 to {} places, not {count}", self.children_max);
        let is_shared = count > 1 && can_share(&request);
        let mut shared = is_shared.then(|| std::mem::take(&mut request.payload));
        let parent = self.insert(request, earlier);
        for place in places_of(places) {
            match &mut shared {
                Some(payload) => {
                    let copy = share(payload);
                    self.start(parent, place, copy, channels);
                }
                None => {
                    let parent_request = self.parent(parent);
                    parent_request.waiting = places & !(1 << place);
                    let payload = std::mem::take(&mut parent_request.request.payload);
                    self.start(parent, place, payload, channels);
                    break;
                }
            }
        }
        if let Some(payload) = shared {
            let parent = self.parent(parent);
            (parent.request.payload, parent.is_shared) = (payload, true);
        }
    }

    /// Sends pieces of a request to places: the first piece gets the first blocks, and so on. They may be in
    /// flight together, so that an atomic write is none.
    ///
    /// # Errors
    /// Returns a request that has another payload than data or none, which has no parts.
    ///
    /// # Panics
    /// If the pieces are not all blocks of the request, or more than the table was made for, or one is empty.
    pub fn divide(
        &mut self,
        mut request: Request,
        pieces: &[Piece],
        channels: &mut BaseChannels,
    ) -> Result<(), Request> {
        if !matches!(request.payload, Payload::Data(_) | Payload::None) {
            return Err(request);
        }
        let count = pieces.len();
        assert!((1..=self.children_max).contains(&count), "1 to {} pieces, not {count}", self.children_max);
        let blocks: u64 = pieces.iter().map(|piece| u64::from(piece.blocks)).sum();
        assert_eq!(blocks, u64::from(request.blocks), "the blocks of the pieces {pieces:?}");
        let mut rest = request.take_data();
        let block_bytes = rest.as_ref().map_or(0, Data::len) / request.blocks as usize;
        let parent = self.insert(request, (0, 0));
        let mut last: Option<Slot> = None;
        for piece in pieces {
            let mut head = rest.take();
            if let Some(data) = &mut head
                && piece.blocks as usize * block_bytes < data.len()
            {
                rest = Some(data.split_off(piece.blocks as usize * block_bytes));
            }
            let child = ChildPart { parent, place: piece.place, is_piece: true, data: None, next: None };
            let slot = self.insert_child(Child::Part(child));
            match last.and_then(|last| self.children.get_mut(last)) {
                Some(Child::Part(last)) => last.next = Some(slot),
                _ => self.parent(parent).first_piece = Some(slot),
            }
            last = Some(slot);
            let payload = Payload::from_data(head);
            let request = self.child_request(parent, slot, payload, (piece.lba, piece.blocks));
            channels.push(piece.place, request);
        }
        Ok(())
    }

    /// Takes the completion of a child. Returns the request if it was the last.
    pub fn complete(&mut self, completion: Completion, channels: &mut BaseChannels) -> Option<FanOutResult> {
        let tag = completion.tag();
        let slot = self.slot_of(tag);
        let entry = slot.and_then(|slot| Some((slot, self.children.get_mut(slot)?)));
        let (slot, child) = match entry {
            Some((slot, Child::Forwarded { .. })) => return self.complete_forwarded(slot, completion),
            Some((slot, Child::Part(child))) => (slot, child),
            None => unreachable!("{tag:?} was completed by a base and is not in the table"),
        };
        let status = completion.status();
        let payload = completion.into_request().payload;
        let (parent_slot, place) = (child.parent, child.place);
        let mut returned = None;
        if child.is_piece {
            child.data = match payload {
                Payload::Data(data) => Some(data),
                _ => None,
            };
        } else {
            self.children.remove(slot);
            returned = Some(payload);
        }
        let parent = self.parent(parent_slot);
        parent.in_flight -= 1;
        if status.is_success() {
            parent.succeeded |= 1 << place;
        } else {
            parent.failed |= 1 << place;
            if parent.status.is_success() {
                parent.status = status;
            }
        }
        if let Some(payload) = returned
            && !parent.is_shared
        {
            if let Some(next) = places_of(parent.waiting).next() {
                parent.waiting &= !(1 << next);
                self.start(parent_slot, next, payload, channels);
                return None;
            }
            parent.request.payload = payload;
        }
        if parent.in_flight > 0 {
            return None;
        }
        self.finish(parent_slot)
    }

    #[inline]
    fn complete_forwarded(&mut self, slot: Slot, completion: Completion) -> Option<FanOutResult> {
        let Some(Child::Forwarded { tag, lba, flags, place }) = self.children.remove(slot) else {
            unreachable!("slot {slot:?} was there")
        };
        self.forwarded -= 1;
        let status = completion.status();
        let mut request = completion.into_request();
        (request.tag, request.lba, request.flags) = (tag, lba, flags);
        let (place, succeeded) = (1 << place, status.is_success());
        let (succeeded, failed) = if succeeded { (place, 0) } else { (0, place) };
        Some(FanOutResult { request, status, succeeded, failed })
    }

    fn finish(&mut self, slot: Slot) -> Option<FanOutResult> {
        let mut parent = self.parents.remove(slot)?;
        if parent.is_shared {
            make_writable(&mut parent.request.payload);
        }
        let (mut next, mut whole) = (parent.first_piece, None::<Data>);
        while let Some(Child::Part(child)) = next.and_then(|slot| self.children.remove(slot)) {
            whole = match (whole, child.data) {
                (Some(whole), Some(data)) => Some(whole.join(data)),
                (one, other) => one.or(other),
            };
            next = child.next;
        }
        if whole.is_some() {
            parent.request.set_data(whole);
        }
        let Parent { request, status, succeeded, failed, .. } = parent;
        Some(FanOutResult { request, status, succeeded, failed })
    }

    fn insert(&mut self, request: Request, (succeeded, failed): (u64, u64)) -> Slot {
        let parent = Parent {
            request,
            status: Status::SUCCESS,
            succeeded,
            failed,
            in_flight: 0,
            waiting: 0,
            is_shared: false,
            first_piece: None,
        };
        match self.parents.insert(parent) {
            Ok(slot) => slot,
            Err(_) => unreachable!("the layer admits no more than the depth of {}", self.parents.capacity()),
        }
    }

    fn parent(&mut self, slot: Slot) -> &mut Parent {
        let Some(parent) = self.parents.get_mut(slot) else {
            unreachable!("a child belongs to a request in the table")
        };
        parent
    }

    fn insert_child(&mut self, child: Child) -> Slot {
        match self.children.insert(child) {
            Ok(slot) => slot,
            Err(_) => unreachable!("each request has at most {} children", self.children_max),
        }
    }

    /// Sends the whole range of a request to a place.
    fn start(&mut self, parent: Slot, place: usize, payload: Payload<Data>, channels: &mut BaseChannels) {
        let child = ChildPart { parent, place, is_piece: false, data: None, next: None };
        let slot = self.insert_child(Child::Part(child));
        let request = &self.parent(parent).request;
        let range = (request.lba, request.blocks);
        let request = self.child_request(parent, slot, payload, range);
        channels.push(place, request);
    }

    fn child_request(
        &mut self,
        parent: Slot,
        slot: Slot,
        payload: Payload<Data>,
        (lba, blocks): (u64, u32),
    ) -> Request {
        let tag = self.tag(slot);
        let parent = self.parent(parent);
        parent.in_flight += 1;
        let request = &parent.request;
        let mut child = BlockRequest::with_payload(tag, request.op, lba, blocks, payload);
        // The base would take it for a request of its own layer.
        child.flags = request.flags - RequestFlags::INTERNAL;
        (child.flow, child.issued_ticks) = (request.flow, request.issued_ticks);
        child
    }
}

impl FanOutResult {
    /// Completes the request with the first error, if there is one.
    pub fn complete(self) -> Completion {
        self.request.complete(self.status)
    }

    /// Completes the request with the module's own status.
    pub fn complete_with(self, status: Status) -> Completion {
        self.request.complete(status)
    }
}

/// The places of a word, from 0.
fn places_of(mut places: u64) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let place = (places != 0).then(|| places.trailing_zeros() as usize)?;
        places &= places - 1;
        Some(place)
    })
}

/// Whether several children can have the payload, and it is afterwards as it was.
fn can_share(request: &Request) -> bool {
    let recovers = |data: &Data| {
        let is_free = |slice: &Buffer| slice.is_whole() || slice.is_external() || !slice.is_writable();
        data.slices().iter().all(is_free)
    };
    match &request.payload {
        Payload::None | Payload::Registered(_) => true,
        Payload::Data(data) => request.op == Op::Write && recovers(data),
        Payload::Protected(protected) => {
            request.op == Op::Write
                && recovers(&protected.data)
                && protected.metadata.as_ref().is_none_or(recovers)
        }
        _ => false,
    }
}

/// Another holder of a payload that [can be shared](can_share).
fn share(payload: &mut Payload<Data>) -> Payload<Data> {
    match payload {
        Payload::Data(data) => Payload::Data(data.share()),
        Payload::Protected(protected) => Payload::Protected(Box::new(ProtectedData {
            data: protected.data.share(),
            metadata: protected.metadata.as_mut().map(Data::share),
            flags: protected.flags,
            tags: protected.tags,
        })),
        Payload::Registered(pages) => Payload::Registered(*pages),
        _ => Payload::None,
    }
}

/// Ends the sharing of a payload whose other holders are gone.
fn make_writable(payload: &mut Payload<Data>) {
    match payload {
        Payload::Data(data) => _ = data.make_writable(),
        Payload::Protected(protected) => {
            protected.data.make_writable();
            protected.metadata.as_mut().map(Data::make_writable);
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests;
