//! A request's data: one buffer or many.

use std::fmt;

use crate::Buffer;

/// The bytes of a request: one slice of memory, or several in order.
///
/// Data is split, joined and shared without copying. The common case, one [`Buffer`], is stored in place: `Data` is as
/// large as a buffer, and only data of several slices has a list of them.
pub enum Data {
    /// One slice.
    One(Buffer),
    /// At least two.
    Many(Slices),
}

/// At least two buffers, in order.
pub struct Slices(Box<List>);

impl Slices {
    /// The slices.
    #[inline]
    pub fn as_slice(&self) -> &[Buffer] {
        &self.0.buffers
    }

    /// The slices, to write them. Their lengths must stay as they are.
    #[inline]
    pub fn as_mut_slice(&mut self) -> &mut [Buffer] {
        &mut self.0.buffers
    }
}

struct List {
    bytes: usize,
    buffers: Vec<Buffer>,
}

const _: () = assert!(size_of::<Option<Data>>() == 24);

impl From<Buffer> for Data {
    #[inline]
    fn from(buffer: Buffer) -> Data {
        Data::One(buffer)
    }
}

impl Data {
    /// The data of several buffers, in order; `None` of none. Neighbours in one allocation become one slice.
    pub fn gather(buffers: Vec<Buffer>) -> Option<Data> {
        let mut joined: Vec<Buffer> = Vec::with_capacity(buffers.len());
        for buffer in buffers {
            push(&mut joined, buffer);
        }
        Data::of(joined)
    }

    /// `None` of none.
    fn of(mut buffers: Vec<Buffer>) -> Option<Data> {
        if buffers.len() < 2 {
            return buffers.pop().map(Data::One);
        }
        let bytes = buffers.iter().map(Buffer::len).sum();
        Some(Data::Many(Slices(Box::new(List { bytes, buffers }))))
    }

    /// Number of bytes, of all slices together.
    #[inline]
    pub fn len(&self) -> usize {
        match self {
            Data::One(buffer) => buffer.len(),
            Data::Many(slices) => slices.0.bytes,
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The slices, in order.
    #[inline]
    pub fn slices(&self) -> &[Buffer] {
        match self {
            Data::One(buffer) => std::slice::from_ref(buffer),
            Data::Many(slices) => slices.as_slice(),
        }
    }

    /// The slices, to write them. Their lengths must stay as they are.
    #[inline]
    pub fn slices_mut(&mut self) -> &mut [Buffer] {
        match self {
            Data::One(buffer) => std::slice::from_mut(buffer),
            Data::Many(slices) => slices.as_mut_slice(),
        }
    }

    /// The only slice, if there is no other.
    #[inline]
    pub fn single(&self) -> Option<&Buffer> {
        match self {
            Data::One(buffer) => Some(buffer),
            Data::Many(_) => None,
        }
    }

    /// As [`single`](Self::single), to write it.
    #[inline]
    pub fn single_mut(&mut self) -> Option<&mut Buffer> {
        match self {
            Data::One(buffer) => Some(buffer),
            Data::Many(_) => None,
        }
    }

    /// The only buffer.
    ///
    /// # Errors
    /// Gives the data back if it has several slices.
    #[inline]
    pub fn into_single(self) -> Result<Buffer, Data> {
        match self {
            Data::One(buffer) => Ok(buffer),
            many => Err(many),
        }
    }

    /// The slices, in order, at least one.
    pub fn into_slices(self) -> Vec<Buffer> {
        match self {
            Data::One(buffer) => vec![buffer],
            Data::Many(slices) => slices.0.buffers,
        }
    }

    /// Whether any slice is [external](Buffer::is_external).
    #[inline]
    pub fn is_external(&self) -> bool {
        self.slices().iter().any(Buffer::is_external)
    }

    /// Whether every slice [may be written](Buffer::is_writable).
    #[inline]
    pub fn is_writable(&self) -> bool {
        self.slices().iter().all(Buffer::is_writable)
    }

    /// Whether every slice begins and ends at a multiple of `alignment` bytes, a power of two. The last slice may end
    /// anywhere.
    #[inline]
    pub fn is_aligned(&self, alignment: usize) -> bool {
        debug_assert!(alignment.is_power_of_two());
        let slices = self.slices();
        let starts = slices.iter().fold(0, |bits, slice| bits | slice.as_ptr().addr());
        let ends = slices[..slices.len() - 1].iter().fold(0, |bits, slice| bits | slice.len());
        (starts | ends) & (alignment - 1) == 0
    }

    /// Cuts the data at `at`: it keeps the bytes before, and the result has the others. Nothing is copied.
    ///
    /// # Panics
    /// If `at` is 0 or not below the length.
    pub fn split_off(&mut self, at: usize) -> Data {
        assert!(at > 0 && at < self.len(), "data of {} bytes can't be split at {at}", self.len());
        let Data::Many(slices) = self else {
            return Data::One(self.slices_mut()[0].split_off(at));
        };
        let list = &mut *slices.0;
        let mut before = 0;
        let index = list.buffers.iter().position(|slice| {
            before += slice.len();
            before > at
        });
        let index = index.expect("`at` is below the length");
        before -= list.buffers[index].len();
        let mut tail = Vec::with_capacity(list.buffers.len() - index + 1);
        let mut rest = list.buffers.drain(index..);
        if at > before {
            let mut cut = rest.next().expect("the slice that was found");
            tail.push(cut.split_off(at - before));
            tail.extend(rest);
            list.buffers.push(cut);
        } else {
            tail.extend(rest);
        }
        list.bytes = at;
        if list.buffers.len() == 1 {
            *self = Data::One(list.buffers.pop().expect("one is left"));
        }
        Data::of(tail).expect("the tail is not empty")
    }

    /// This data and then `next`, as one. Nothing is copied; slices that were one become one again, two that are
    /// all of the data without an allocation.
    #[must_use]
    pub fn join(self, next: Data) -> Data {
        let (first, next) = match (self, next) {
            (Data::One(first), Data::One(next)) => match first.join(next) {
                Ok(joined) => return Data::One(joined),
                Err((first, next)) => (Data::One(first), Data::One(next)),
            },
            data => data,
        };
        let mut buffers = first.into_slices();
        for buffer in next.into_slices() {
            push(&mut buffers, buffer);
        }
        Data::of(buffers).expect("there are two data at least")
    }

    /// Other data of the same bytes. From now on neither can be written.
    pub fn share(&mut self) -> Data {
        match self {
            Data::One(buffer) => Data::One(buffer.share()),
            Data::Many(slices) => {
                let bytes = slices.0.bytes;
                let buffers = slices.0.buffers.iter_mut().map(Buffer::share).collect();
                Data::Many(Slices(Box::new(List { bytes, buffers })))
            }
        }
    }

    /// Makes data writable again whose other holders are gone. Returns whether all of it is writable.
    pub fn make_writable(&mut self) -> bool {
        let read_only =
            self.slices_mut().iter_mut().filter_map(|slice| (!slice.make_writable()).then_some(()));
        read_only.count() == 0
    }

    /// Sets every byte to zero.
    ///
    /// # Panics
    /// If a slice is [shared](Buffer::share).
    #[inline]
    pub fn clear(&mut self) {
        self.slices_mut().iter_mut().for_each(Buffer::clear);
    }

    /// The `length` bytes from `offset`, in order, in one part for each slice that has some of them. Bytes beyond the end
    /// are left out.
    ///
    /// # Panics
    /// If a slice is [external](Buffer::is_external).
    pub fn parts(&self, offset: usize, length: usize) -> impl Iterator<Item = &[u8]> {
        let (mut skip, mut left) = (offset, length);
        self.slices().iter().filter_map(move |slice| {
            let (from, count) = part_of(slice.len(), &mut skip, &mut left)?;
            Some(&slice.as_slice()[from..from + count])
        })
    }

    /// As [`parts`](Self::parts), to write them.
    ///
    /// # Panics
    /// If a slice is [external](Buffer::is_external) or [shared](Buffer::share).
    pub fn parts_mut(&mut self, offset: usize, length: usize) -> impl Iterator<Item = &mut [u8]> {
        let (mut skip, mut left) = (offset, length);
        self.slices_mut().iter_mut().filter_map(move |slice| {
            let (from, count) = part_of(slice.len(), &mut skip, &mut left)?;
            Some(&mut slice.as_mut_slice()[from..from + count])
        })
    }

    /// The slice with the byte at `offset`, and that byte's place in it; `None` beyond the end.
    pub fn slice_at_mut(&mut self, offset: usize) -> Option<(&mut Buffer, usize)> {
        let mut skip = offset;
        self.slices_mut().iter_mut().find_map(|slice| match skip.checked_sub(slice.len()) {
            Some(rest) => {
                skip = rest;
                None
            }
            None => Some((slice, skip)),
        })
    }

    /// Copies `out.len()` bytes from `offset`.
    ///
    /// # Panics
    /// If the range is not inside.
    pub fn copy_to(&self, offset: usize, out: &mut [u8]) {
        let length = out.len();
        let (mut skip, mut left, mut out) = (offset, length, out);
        for slice in self.slices() {
            let Some((from, count)) = part_of(slice.len(), &mut skip, &mut left) else { continue };
            let (head, tail) = out.split_at_mut(count);
            slice.copy_to(from, head);
            out = tail;
        }
        assert!(left == 0, "{length} bytes at {offset} are not inside data of {} bytes", self.len());
    }

    /// Copies all of `data` to `offset`.
    ///
    /// # Panics
    /// If the range is not inside, or a slice is [shared](Buffer::share).
    pub fn copy_from(&mut self, offset: usize, data: &[u8]) {
        let (mut skip, mut left, mut rest) = (offset, data.len(), data);
        for slice in self.slices_mut() {
            let Some((from, count)) = part_of(slice.len(), &mut skip, &mut left) else { continue };
            let (head, tail) = rest.split_at(count);
            slice.copy_from(from, head);
            rest = tail;
        }
        let bytes = self.len();
        assert!(left == 0, "{} bytes at {offset} are not inside data of {bytes} bytes", data.len());
    }
}

/// Appends a buffer, as part of the last one where it is its neighbour.
fn push(buffers: &mut Vec<Buffer>, buffer: Buffer) {
    let Some(last) = buffers.pop() else { return buffers.push(buffer) };
    match last.join(buffer) {
        Ok(joined) => buffers.push(joined),
        Err((last, buffer)) => buffers.extend([last, buffer]),
    }
}

/// Of the next slice, of `bytes` bytes: from where it belongs to a range, and how many bytes. Counts down what is before
/// the range, and its rest.
fn part_of(bytes: usize, skip: &mut usize, left: &mut usize) -> Option<(usize, usize)> {
    let from = (*skip).min(bytes);
    let count = (*left).min(bytes - from);
    (*skip, *left) = (*skip - from, *left - count);
    (count > 0).then_some((from, count))
}

impl fmt::Debug for Data {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Data::One(buffer) => buffer.fmt(f),
            Data::Many(slices) => f.debug_list().entries(&slices.0.buffers).finish(),
        }
    }
}

#[cfg(test)]
mod tests;
