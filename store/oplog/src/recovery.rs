//! Finding the entries of a log after a crash, from the part of its area that has them.

use wire_store::{EntryHeader, LogHeader, SECTOR_BYTES, crc32c};

use crate::{ENTRY_ALIGNMENT, Log, LogError, RecoveredEntries};

/// Pieces are multiples of the largest sector.
const PIECE_ALIGNMENT: u64 = 4096;

/// Recovers a log while its area is read, piece by piece from the first entry on, until the end of the last one. A log that
/// is nearly empty, as most are, costs one piece and not its area.
///
/// Nothing bounds how far behind the end there is something: writes in flight end in any order, and entries may have been
/// given up. It need not be known, since no new entry is followed by it (see [`wire_store::EntryLayout::Salted`]).
///
/// Call [`next_piece`](Self::next_piece) and [`take`](Self::take) in turn, then [`finish`](Self::finish). In memory are the
/// entries that were found and what was read of one more.
#[derive(Debug)]
pub struct LogRecovery {
    log: Log,
    entries: RecoveredEntries,
    /// What was read from this position on.
    start: u64,
    bytes: Vec<u8>,
    piece_bytes: u64,
    is_complete: bool,
    damage: Option<LogDamage>,
}

/// An entry that was durable, and is not there any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "entry {sequence} of the log is damaged: entry {proof} follows, and was appended when that one was durable"
)]
pub struct LogDamage {
    /// The entry.
    pub sequence: u64,
    /// What proves it.
    pub proof: u64,
}

/// What is at a position.
enum EntrySearch {
    /// The next entry, its header as it is there, and its data.
    Found(Box<(EntryHeader, [u8; EntryHeader::SIZE])>, Vec<u8>),
    /// None that is complete.
    Nothing,
    /// One that may be complete, of which more must be read.
    Unread,
}

impl LogRecovery {
    /// Begins with the two headers of a log, and the size of its area. The device is flushed before: what a killed process
    /// wrote may only be in its cache. `salt` is random: the one of new entries.
    ///
    /// # Errors
    /// [`LogError::Header`] and [`LogError::Size`].
    ///
    /// # Panics
    /// If pieces are no multiple of 4096 bytes, the largest sector.
    pub fn new(
        slots: &[[u8; SECTOR_BYTES]; 2],
        area_bytes: u64,
        piece_bytes: u64,
        salt: u32,
    ) -> Result<LogRecovery, LogError> {
        let is_aligned = piece_bytes > 0 && piece_bytes.is_multiple_of(PIECE_ALIGNMENT);
        assert!(is_aligned, "a piece has {piece_bytes} bytes");
        let decoded = [LogHeader::decode(&slots[0], 0), LogHeader::decode(&slots[1], 1)];
        let first_error = decoded[0].clone().err();
        let newest = decoded.into_iter().flatten().max_by_key(|header| header.generation);
        let Some(header) = newest else {
            return Err(LogError::Header(first_error.expect("neither is valid")));
        };
        if header.capacity != area_bytes {
            return Err(LogError::Size { found: area_bytes, expected: header.capacity });
        }
        let start = header.head - (header.head % header.capacity) % PIECE_ALIGNMENT;
        let log = Log { salt, ..Log::empty(header) };
        let (entries, bytes) = (Vec::new(), Vec::new());
        Ok(LogRecovery { log, entries, start, bytes, piece_bytes, is_complete: false, damage: None })
    }

    /// The next part of the area to read: its offset and length in bytes. `None` when all entries are found.
    pub fn next_piece(&self) -> Option<(u64, usize)> {
        if self.is_complete {
            return None;
        }
        let capacity = self.log.durable.capacity;
        let offset = self.end() % capacity;
        let bytes = self.piece_bytes - offset % self.piece_bytes;
        Some((offset, bytes.min(capacity - offset) as usize))
    }

    /// Takes that part.
    ///
    /// # Panics
    /// If it is not as long as [`next_piece`](Self::next_piece) says.
    pub fn take(&mut self, piece: &[u8]) {
        let expected = self.next_piece().map(|(_, bytes)| bytes);
        assert_eq!(Some(piece.len()), expected, "it is not the next piece");
        self.bytes.extend_from_slice(piece);
        self.is_complete = self.take_entries();
        if self.is_complete {
            self.damage = self.find_damage();
        }
        // The last sector that has an entry may have another one.
        let done = self.log.tail.saturating_sub(PIECE_ALIGNMENT).saturating_sub(self.start);
        self.bytes.drain(..done as usize);
        self.start += done;
    }

    /// The log and its entries, which are to be applied again; the log continues after them.
    ///
    /// # Panics
    /// If [`next_piece`](Self::next_piece) wants more.
    pub fn finish(self) -> (Log, RecoveredEntries) {
        assert!(self.is_complete, "the end of the log is not read");
        (self.log, self.entries)
    }

    /// Whether the log ends where it does because an entry is damaged. A damaged last entry cannot be told
    /// from one that a crash tore, but entries are appended with what was durable then. What follows in the
    /// last piece counts.
    pub fn damage(&self) -> Option<LogDamage> {
        self.damage
    }

    fn find_damage(&self) -> Option<LogDamage> {
        let (log, sequence) = (&self.log, self.log.next_sequence);
        let end = self.end().min(log.durable.head + log.durable.capacity);
        let first = log.shared_position().unwrap_or(log.tail);
        let mut positions = (first..end).step_by(ENTRY_ALIGNMENT as usize);
        let proof = positions.find_map(|position| {
            let header: [u8; EntryHeader::SIZE] = self.read(position, EntryHeader::SIZE)?.try_into().ok()?;
            let of_entry = log.durable.log_of_entry(EntryHeader::salt(&header));
            let entry = EntryHeader::decode(&header, of_entry, position).ok()?;
            // Those that were given up were appended before what is there was durable.
            let is_proof = entry.object.group == log.durable.group && entry.commit_point >= sequence;
            (is_proof && entry.sequence > sequence).then_some(entry.sequence)
        })?;
        Some(LogDamage { sequence, proof })
    }

    /// The position behind what was read.
    fn end(&self) -> u64 {
        self.start + self.bytes.len() as u64
    }

    /// Finds the entries in what was read; whether these are all.
    fn take_entries(&mut self) -> bool {
        loop {
            let positions = [self.log.tail].into_iter().chain(self.log.shared_position());
            let searches = positions.map(|position| (position, self.entry_at(position)));
            let found = searches.into_iter().find(|(_, search)| !matches!(search, EntrySearch::Nothing));
            let (position, entry, data) = match found {
                None => return true,
                Some((_, EntrySearch::Nothing | EntrySearch::Unread)) => return false,
                Some((position, EntrySearch::Found(entry, data))) => (position, entry, data),
            };
            let (entry, header) = *entry;
            let place = self.log.place_at(position, entry.data_bytes());
            self.log.push(place, &entry, &header);
            self.log.written(place);
            self.entries.push((entry, data));
        }
    }

    /// The entry at a position, if it is the next one.
    fn entry_at(&self, position: u64) -> EntrySearch {
        let log = &self.log;
        if log.place_at(position, 0).bytes > log.room() {
            return EntrySearch::Nothing;
        }
        let Some(header) = self.read(position, EntryHeader::SIZE) else { return EntrySearch::Unread };
        let header: [u8; EntryHeader::SIZE] = header.try_into().expect("it has this size");
        let of_entry = log.durable.log_of_entry(EntryHeader::salt(&header));
        let Ok(entry) = EntryHeader::decode(&header, of_entry, position) else { return EntrySearch::Nothing };
        let is_next = entry.sequence == log.next_sequence
            && entry.previous_crc32c == log.previous_crc32c
            && entry.object.group == log.durable.group;
        if !is_next || log.place_at(position, entry.data_bytes()).bytes > log.room() {
            return EntrySearch::Nothing;
        }
        let Some(data) = self.read(position + EntryHeader::SIZE as u64, entry.data_bytes()) else {
            return EntrySearch::Unread;
        };
        if !entry.in_place && entry.data_crc32c != crc32c(data) {
            return EntrySearch::Nothing;
        }
        let data = data.to_vec();
        EntrySearch::Found(Box::new((entry, header)), data)
    }

    /// What was read of a part of the log; `None` if its end was not.
    fn read(&self, position: u64, bytes: usize) -> Option<&[u8]> {
        let from = (position - self.start) as usize;
        self.bytes.get(from..from + bytes)
    }
}

impl Log {
    /// Finds the entries of a log whose area is in memory, as [`LogRecovery`] does.
    ///
    /// # Errors
    /// [`LogError::Header`] and [`LogError::Size`].
    pub fn recover(
        slots: &[[u8; SECTOR_BYTES]; 2],
        area: &[u8],
        salt: u32,
    ) -> Result<(Log, RecoveredEntries), LogError> {
        let mut recovery = LogRecovery::new(slots, area.len() as u64, PIECE_ALIGNMENT, salt)?;
        while let Some((offset, bytes)) = recovery.next_piece() {
            recovery.take(&area[offset as usize..][..bytes]);
        }
        Ok(recovery.finish())
    }
}
