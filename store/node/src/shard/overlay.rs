//! What the log has that is not in place yet: by object, which bytes come from which entry.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;

use dma::{Buffer, Data, Parcel};
use foldhash::HashMap;
use wire_store::{EntryHeader, ObjectId};

/// The data of a log entry, kept until it is in place.
#[derive(Clone, Debug)]
pub(crate) enum EntryData {
    /// None: the operation has no data.
    None,
    /// As it was logged.
    Logged(Rc<LoggedEntry>),
    /// As it was found in the log after a crash, or in a copy.
    Recovered(Arc<Vec<u8>>),
}

/// The memory of an entry of the log: its header, the data, padding.
pub(crate) struct LoggedEntry {
    buffer: Buffer,
    /// The same, for the thread that writes it in place, if that is another one.
    to_send: Cell<Option<Buffer>>,
}

impl std::fmt::Debug for LoggedEntry {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::fmt::Debug::fmt(&self.buffer, f)
    }
}

/// The data of an entry on its way to another thread.
pub(crate) enum SentData {
    None,
    Logged(Parcel),
    Recovered(Arc<Vec<u8>>),
}

impl EntryData {
    /// That of an entry with this memory. If it `is_sent`, [`send`](Self::send) is called once.
    pub(crate) fn logged(mut buffer: Buffer, is_sent: bool) -> EntryData {
        let to_send = Cell::new(is_sent.then(|| buffer.share()));
        EntryData::Logged(Rc::new(LoggedEntry { buffer, to_send }))
    }

    /// The data for another thread, while this one still reads it.
    pub(crate) fn send(&self) -> SentData {
        match self {
            EntryData::None => SentData::None,
            EntryData::Logged(entry) => {
                let shared = entry.to_send.take().expect("an entry goes in place once");
                SentData::Logged(Data::One(shared).into_parcel())
            }
            EntryData::Recovered(bytes) => SentData::Recovered(bytes.clone()),
        }
    }

    /// The data from `offset` on, and what follows it in memory.
    pub(crate) fn bytes_from(&self, offset: u32) -> &[u8] {
        match self {
            EntryData::None => &[],
            EntryData::Logged(entry) => &entry.buffer.as_slice()[EntryHeader::SIZE + offset as usize..],
            EntryData::Recovered(bytes) => &bytes[offset as usize..],
        }
    }
}

/// Where bytes come from.
#[derive(Clone, Debug)]
pub(crate) enum ByteSource {
    /// They are zero.
    Zeroes,
    /// The entry's data, from this offset.
    Data(EntryData, u32),
}

impl ByteSource {
    /// The same source, `count` bytes later.
    fn skip(self, count: u32) -> ByteSource {
        match self {
            ByteSource::Zeroes => ByteSource::Zeroes,
            ByteSource::Data(data, from) => ByteSource::Data(data, from + count),
        }
    }

    /// Fills `out`.
    pub(crate) fn copy_to(&self, out: &mut [u8]) {
        match self {
            ByteSource::Zeroes => out.fill(0),
            ByteSource::Data(data, from) => out.copy_from_slice(&data.bytes_from(*from)[..out.len()]),
        }
    }
}

#[derive(Clone, Debug)]
struct Interval {
    end: u32,
    sequence: u64,
    source: ByteSource,
}

/// A part of a range that comes from the log.
#[derive(Clone, Debug)]
pub(crate) struct Segment {
    pub(crate) start: u32,
    pub(crate) end: u32,
    pub(crate) source: ByteSource,
}

/// The interval map of each object. It has committed entries only, so that reads return committed data only.
#[derive(Debug, Default)]
pub(crate) struct Overlay(HashMap<ObjectId, BTreeMap<u32, Interval>>);

impl Overlay {
    /// A newer entry has these bytes of an object.
    pub(crate) fn insert(
        &mut self,
        object: ObjectId,
        range: std::ops::Range<u32>,
        sequence: u64,
        source: ByteSource,
    ) {
        let (start, end) = (range.start, range.end);
        let intervals = self.0.entry(object).or_default();
        let before = intervals.range(..start).next_back().filter(|(_, interval)| interval.end > start);
        if let Some((first, before)) = before.map(|(first, interval)| (*first, interval.clone())) {
            if before.end > end {
                let source = before.source.clone().skip(end - first);
                intervals.insert(end, Interval { source, ..before.clone() });
            }
            intervals.insert(first, Interval { end: start, ..before });
        }
        while let Some((&first, found)) = intervals.range(start..end).next() {
            let rest = (found.end > end)
                .then(|| Interval { source: found.source.clone().skip(end - first), ..found.clone() });
            intervals.remove(&first);
            rest.and_then(|rest| intervals.insert(end, rest));
        }
        intervals.insert(start, Interval { end, sequence, source });
    }

    /// Whether any bytes of an object come from the log.
    pub(crate) fn has_entries(&self, object: ObjectId) -> bool {
        self.0.contains_key(&object)
    }

    /// The parts of a range that come from the log, in order.
    pub(crate) fn segments(&self, object: ObjectId, range: std::ops::Range<u32>) -> Vec<Segment> {
        let Some(intervals) = self.0.get(&object) else { return Vec::new() };
        let before = intervals.range(..range.start).next_back();
        let found = before.into_iter().chain(intervals.range(range.clone()));
        let found = found.filter(|(_, interval)| interval.end > range.start);
        found
            .map(|(&first, interval)| {
                let start = first.max(range.start);
                let source = interval.source.clone().skip(start - first);
                Segment { start, end: interval.end.min(range.end), source }
            })
            .collect()
    }

    /// The entries of an object with sequences up to `through` are in place.
    pub(crate) fn forget(&mut self, object: ObjectId, through: u64) {
        if let Some(intervals) = self.0.get_mut(&object) {
            intervals.retain(|_, interval| interval.sequence > through);
            if intervals.is_empty() {
                self.0.remove(&object);
            }
        }
    }

    #[cfg(test)]
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use random::WyRand;

    const ID: ObjectId = ObjectId { group: 0, volume: 1, index: 0, suffix: 0 };

    #[test]
    fn an_overlay_is_the_newest_entry_of_each_byte() {
        let mut random = WyRand::new(1);
        for _ in 0..300 {
            let (mut overlay, mut oracle) = (Overlay::default(), vec![None; 64]);
            for sequence in 1..20u64 {
                if random.happens(100) {
                    let through = random.below(sequence);
                    overlay.forget(ID, through);
                    oracle.iter_mut().for_each(|byte: &mut Option<(u64, u8)>| {
                        *byte = byte.filter(|(written, _)| *written > through);
                    });
                }
                let start = random.below(63) as usize;
                let end = start + 1 + random.below(64 - start as u64) as usize;
                let data: Vec<u8> = (start..end).map(|_| random.below(256) as u8).collect();
                let source = if random.happens(300) {
                    oracle[start..end].fill(Some((sequence, 0)));
                    ByteSource::Zeroes
                } else {
                    let bytes = oracle[start..end].iter_mut().zip(&data);
                    bytes.for_each(|(byte, data)| *byte = Some((sequence, *data)));
                    ByteSource::Data(EntryData::Recovered(Arc::new(data)), 0)
                };
                overlay.insert(ID, start as u32..end as u32, sequence, source);
                let from = random.below(63) as usize;
                let to = from + 1 + random.below(64 - from as u64) as usize;
                let mut found = [None; 64];
                let mut last = from as u32;
                for segment in overlay.segments(ID, from as u32..to as u32) {
                    assert!(last <= segment.start && segment.start < segment.end);
                    last = segment.end;
                    let mut bytes = vec![0; (segment.end - segment.start) as usize];
                    segment.source.copy_to(&mut bytes);
                    let out = found[segment.start as usize..segment.end as usize].iter_mut();
                    out.zip(bytes).for_each(|(out, byte)| *out = Some(byte));
                }
                let expected = oracle.iter().map(|byte| byte.map(|(_, byte)| byte));
                assert!(found[from..to].iter().copied().eq(expected.skip(from).take(to - from)));
            }
            overlay.forget(ID, u64::MAX);
            assert!(overlay.is_empty());
        }
    }
}
