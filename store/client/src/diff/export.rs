//! Exports what differs between two snapshots of an image.
//!
//! Some lanes look up, object by object, which blocks are to be read; others read them. Both do several at a
//! time, and end in the order of the image, in which the stream has its records.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeSet, VecDeque};
use std::io::{self, Write};
use std::mem::take;
use std::ops::Range;
use std::sync::Arc;

use cluster_map::ParentVolume;
use reactor::Core;
use wire_store::{BLOCK_BYTES, BlockBitmap, DiffEncoder, DiffHeader, DiffSnapshot, OBJECT_BYTES};

use super::DiffError;
use super::plan::{BlockSearch, ChangedVolume, DiffPart, SnapshotChain, changed_volumes, checksum_of};
use super::stream::{DiffPosition, FileThread};
use super::turns::{LaneTurns, LaneWait};
use crate::attach::AttachState;
use crate::copy::nonzero_runs;
use crate::lanes::{LANES, Lane, run_lanes};
use crate::layers::{FoundImage, VolumeIo, find_image, zero_from};
use crate::reclaim::{ReclaimError, sweep};
use crate::sweep::SweepKind;
use crate::watch::PoolWatch;
use crate::{ClientError, Cluster};

/// Parts that are looked up before they are read.
const PLANNED_MAX: usize = 4 * LANES;
/// Records are written to the stream when they have this many bytes.
const WRITE_BYTES: usize = 256 << 10;

/// What an export has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExportedDiff {
    /// Objects in which something may differ.
    pub objects: u64,
    /// Bytes of data that were written to the stream.
    pub data_bytes: u64,
    /// Bytes of the image that were recorded as zeroes.
    pub zero_bytes: u64,
    /// Bytes of the stream, those before the position included.
    pub stream_bytes: u64,
}

/// What differs between two snapshots of an image, or all that one of them has.
pub struct DiffExport {
    cluster: Cluster,
    pool: String,
    image: String,
    header: DiffHeader,
    to: SnapshotChain,
    from: SnapshotChain,
}

impl DiffExport {
    /// Looks up snapshots of an image in the map. Without `from` all is exported that `to` has.
    ///
    /// # Errors
    /// [`ClientError::NoImage`], [`ClientError::NoSnapshot`].
    pub fn new(
        cluster: &Cluster,
        (pool, image): (&str, &str),
        to: &str,
        from: Option<&str>,
    ) -> Result<DiffExport, DiffError> {
        let images = cluster.map().images()?;
        let find = |snapshot: &str| find_image(&images, pool, &format!("{image}@{snapshot}"));
        let (end, start) = (find(to)?, from.map(find).transpose()?);
        let described = |found: &FoundImage, name: &str| DiffSnapshot {
            id: found.uuid().into_bytes(),
            bytes: found.bytes(),
            name: name.to_string(),
        };
        let (chain, from_chain) = (chain_of(&end), start.as_ref().map_or_else(Vec::new, chain_of));
        let header = DiffHeader {
            image: end.entry.uuid.into_bytes(),
            image_name: end.image.clone(),
            to: described(&end, to),
            from: start.as_ref().zip(from).map(|(start, name)| described(start, name)),
            created: end.snapshot.as_ref().map_or(0, |snapshot| snapshot.created),
            chain: checksum_of(&chain, &from_chain),
        };
        let (pool, image) = (pool.to_string(), image.to_string());
        Ok(DiffExport { cluster: cluster.clone(), pool, image, header, to: chain, from: from_chain })
    }

    /// The begin of the stream. One with another begin is another stream, and does not go on with this.
    pub fn header(&self) -> &DiffHeader {
        &self.header
    }

    /// Writes the stream, from a position on, and gives its file back. `progress` gets the objects that are
    /// done, and how many there are.
    ///
    /// # Errors
    /// [`DiffError::SnapshotRemoved`] if snapshots of the image were removed meanwhile: then the stream has
    /// no end, and what it has may be wrong. [`DiffError::Stream`] of a position at which no record of this
    /// stream ends. Else [`DiffError`]: it can be gone on with.
    pub async fn write<W: Write + Send + 'static>(
        &self,
        core: &Core,
        stream: W,
        position: DiffPosition,
        mut progress: impl FnMut(u64, u64),
    ) -> Result<(ExportedDiff, W), DiffError> {
        check_position(position.offset, self.header.to.bytes)?;
        let watch = PoolWatch::start(&self.cluster, &self.pool)?;
        let pool = watch.view().0.pool.clone();
        // Snapshots are only read, beside a client that writes the image.
        let reads = Arc::new(AttachState::new(0, pool.first_group..pool.first_group + pool.groups));
        let changed = changed_volumes(&self.to, &self.from);
        let objects = self.list_objects(core, &watch, &reads, &changed, position.offset).await?;
        let count = objects.len() as u64;
        let head = self.to.first().map_or(0, |volume| volume.volume);
        let mut records = DiffRecords::new(&self.header, position);
        if position.stream_bytes == 0 {
            records.put(&self.header.encode());
        }
        let exporting = ExportingDiff {
            export: self,
            core: core.clone(),
            io: VolumeIo::new(core, watch, reads, head),
            changed,
            start: position.offset,
            objects: RefCell::new(objects),
            planned: RefCell::default(),
            planners: Cell::new(LANES),
            waiting: LaneWait::default(),
            plans: LaneTurns::default(),
            reads: LaneTurns::default(),
            records: RefCell::new(records),
            done: Cell::new(0),
            file: FileThread::new(Some(stream)).map_err(DiffError::Stream)?,
        };
        let mut lanes: Vec<Lane<'_, DiffError>> = Vec::new();
        for _ in 0..LANES {
            lanes.push(Box::pin(exporting.plan_objects()));
            lanes.push(Box::pin(exporting.read_parts()));
        }
        let read = run_lanes(lanes, || progress(exporting.done.get(), count)).await;
        // What was read before an error is in the stream, so that it is gone on with.
        exporting.write_out(0).await?;
        read?;
        self.check_unchanged()?;
        exporting.records.borrow_mut().end();
        exporting.write_out(0).await?;
        let written = |file: &mut Option<W>| {
            let mut file = file.take().ok_or_else(|| io::Error::other("it was closed"))?;
            file.flush()?;
            Ok::<_, io::Error>(file)
        };
        let file = exporting.file.run(written).await??;
        let exported = exporting.records.borrow().exported;
        Ok((ExportedDiff { objects: count, ..exported }, file))
    }

    /// The indices of the objects in which something may differ, from an offset of the image on.
    async fn list_objects(
        &self,
        core: &Core,
        watch: &Arc<PoolWatch>,
        reads: &Arc<AttachState>,
        changed: &[ChangedVolume],
        offset: u64,
    ) -> Result<VecDeque<u32>, DiffError> {
        let end = self.header.to.bytes.div_ceil(OBJECT_BYTES as u64);
        let first = offset / OBJECT_BYTES as u64;
        let mut all = BTreeSet::new();
        // The last block may be a short one: its end is not the begin of another one.
        if offset >= self.header.to.bytes {
            return Ok(VecDeque::new());
        }
        for volume in changed {
            let range = volume.objects();
            let kind = SweepKind::Indices { end: range.end.min(end) };
            let swept = sweep(core, watch.clone(), volume.volume, reads.clone(), kind, |_, _| {}).await;
            let indices = swept.map_err(ReclaimError::of_list)?.indices.into_iter();
            all.extend(indices.filter(|index| u64::from(*index) >= first.max(range.start)));
        }
        Ok(all.into_iter().collect())
    }

    /// Refuses to end the stream where a snapshot was removed: its volume may have been emptied while it was
    /// read. The removal changes the map before that.
    fn check_unchanged(&self) -> Result<(), DiffError> {
        let removed = || DiffError::SnapshotRemoved { pool: self.pool.clone(), image: self.image.clone() };
        let from = self.header.from.as_ref().map(|from| from.name.as_str());
        let again = DiffExport::new(&self.cluster, (&self.pool, &self.image), &self.header.to.name, from);
        match again {
            Ok(again) if again.header == self.header => Ok(()),
            Ok(_) | Err(DiffError::Client(ClientError::NoSnapshot { .. } | ClientError::NoImage { .. })) => {
                Err(removed())
            }
            Err(error) => Err(error),
        }
    }
}

/// Refuses an offset at which no record of an image of this size ends.
fn check_position(offset: u64, bytes: u64) -> Result<(), DiffError> {
    match offset == bytes || (offset < bytes && offset.is_multiple_of(BLOCK_BYTES as u64)) {
        true => Ok(()),
        false => Err(DiffError::Stream(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!("no record of an image of {bytes} bytes ends at its byte {offset}"),
        ))),
    }
}

/// The volumes of a snapshot. Nothing is seen behind the size that the image had then.
fn chain_of(found: &FoundImage) -> SnapshotChain {
    let bytes = found.bytes();
    let own = ParentVolume { volume: found.head(), bytes };
    let parents = found.parents.iter().map(|it| ParentVolume { bytes: it.bytes.min(bytes), ..*it });
    [own].into_iter().chain(parents).collect()
}

/// A part of the image that is to be read.
struct PlannedPart {
    /// Offset of its object in the image.
    object: u64,
    part: DiffPart,
    is_last: bool,
}

/// What the lanes share.
struct ExportingDiff<'a, W> {
    export: &'a DiffExport,
    core: Core,
    io: VolumeIo,
    changed: Vec<ChangedVolume>,
    start: u64,
    objects: RefCell<VecDeque<u32>>,
    planned: RefCell<VecDeque<PlannedPart>>,
    /// Lanes that look up parts.
    planners: Cell<usize>,
    waiting: LaneWait,
    plans: LaneTurns,
    reads: LaneTurns,
    records: RefCell<DiffRecords>,
    /// Objects that are in the stream.
    done: Cell<u64>,
    file: FileThread<Option<W>>,
}

impl<W: Write + Send + 'static> ExportingDiff<'_, W> {
    /// Looks up the parts of one object after the other.
    async fn plan_objects(&self) -> Result<(), DiffError> {
        loop {
            let Some(index) = self.objects.borrow_mut().pop_front() else { break };
            let turn = self.plans.begin();
            let parts = self.plan(index).await?;
            let has_place = || self.planned.borrow().len() < PLANNED_MAX;
            self.waiting.until(|| self.plans.is_next(turn) && has_place()).await;
            if parts.is_empty() {
                self.done.set(self.done.get() + 1);
            }
            let (object, last) = (u64::from(index) * OBJECT_BYTES as u64, parts.len());
            let parts = parts.into_iter().zip(1..);
            let parts = parts.map(|(part, place)| PlannedPart { object, part, is_last: place == last });
            self.planned.borrow_mut().extend(parts);
            self.plans.end();
            self.waiting.notify();
        }
        self.planners.set(self.planners.get() - 1);
        self.waiting.notify();
        Ok(())
    }

    /// The parts of an object that may differ.
    async fn plan(&self, index: u32) -> Result<Vec<DiffPart>, DiffError> {
        let object = u64::from(index) * OBJECT_BYTES as u64;
        let in_object = |bytes: u64| bytes.saturating_sub(object).min(OBJECT_BYTES as u64) as u32;
        let mut known: Vec<(u64, BlockBitmap)> = Vec::new();
        let mut blocks = BlockBitmap::default();
        for volume in &self.changed {
            let may_differ = volume.blocks(index);
            if !may_differ.is_empty() {
                let written = self.written(volume.volume, index).await?;
                known.push((volume.volume, written));
                blocks = blocks.or(&written.and(&may_differ));
            }
        }
        let end = in_object(self.export.header.to.bytes);
        let blocks = blocks.and(&BlockBitmap::touched(in_object(self.start), end));
        let mut search = BlockSearch::new(index, blocks);
        for volume in &self.export.to {
            if search.needs(volume) {
                let written = match known.iter().find(|(of, _)| *of == volume.volume) {
                    Some((_, written)) => *written,
                    None => self.written(volume.volume, index).await?,
                };
                search.found(volume, &written);
            }
        }
        Ok(search.parts(end))
    }

    async fn written(&self, volume: u64, index: u32) -> Result<BlockBitmap, DiffError> {
        Ok(self.io.written(volume, index).await.map_err(ReclaimError::Unlisted)?)
    }

    /// Reads one part after the other, and writes its records in its turn.
    async fn read_parts(&self) -> Result<(), DiffError> {
        loop {
            let is_planned = || !self.planned.borrow().is_empty() || self.planners.get() == 0;
            self.waiting.until(is_planned).await;
            let Some(planned) = self.planned.borrow_mut().pop_front() else { return Ok(()) };
            self.waiting.notify();
            let turn = self.reads.begin();
            let data = self.read(&planned).await?;
            self.waiting.until(|| self.reads.is_next(turn)).await;
            let PlannedPart { object, part, is_last } = planned;
            let start = object + u64::from(part.offset);
            match data {
                Some(data) => self.records.borrow_mut().add(start, &data),
                None => self.records.borrow_mut().add_zeroes(start..start + u64::from(part.length)),
            }
            self.write_out(WRITE_BYTES).await?;
            self.done.set(self.done.get() + u64::from(is_last));
            self.reads.end();
            self.waiting.notify();
        }
    }

    /// The data of a part; `None` if it is zero.
    async fn read(
        &self,
        PlannedPart { object, part, .. }: &PlannedPart,
    ) -> Result<Option<Vec<u8>>, DiffError> {
        let Some((volume, limit)) = part.source else { return Ok(None) };
        let length = part.length as usize;
        let buffer = self.core.pool().take(length).ok_or(DiffError::NoMemory)?;
        let start = object + u64::from(part.offset);
        let mut data = self.io.read(volume, start, buffer).await.map_err(DiffError::Read)?;
        zero_from(&mut data, limit.saturating_sub(part.offset) as usize);
        let mut bytes = vec![0; length];
        data.copy_to(0, &mut bytes);
        Ok(Some(bytes))
    }

    /// Writes records to the stream, if they have some bytes.
    async fn write_out(&self, bytes_min: usize) -> Result<(), DiffError> {
        if self.records.borrow().bytes.len() < bytes_min.max(1) {
            return Ok(());
        }
        let bytes = take(&mut self.records.borrow_mut().bytes);
        let write = move |file: &mut Option<W>| match file {
            Some(file) => file.write_all(&bytes),
            None => Ok(()),
        };
        Ok(self.file.run(write).await??)
    }
}

/// Records on their way to the stream.
struct DiffRecords {
    encoder: DiffEncoder,
    /// Of everything: what is zero in a new image is not recorded.
    skips_zeroes: bool,
    /// Zeroes that may go on with the next record.
    zeroes: Range<u64>,
    bytes: Vec<u8>,
    exported: ExportedDiff,
}

impl DiffRecords {
    fn new(header: &DiffHeader, position: DiffPosition) -> DiffRecords {
        DiffRecords {
            encoder: DiffEncoder::new(header, position.records),
            skips_zeroes: header.from.is_none(),
            zeroes: 0..0,
            bytes: Vec::new(),
            exported: ExportedDiff { stream_bytes: position.stream_bytes, ..ExportedDiff::default() },
        }
    }

    fn put(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
        self.exported.stream_bytes += bytes.len() as u64;
    }

    /// Adds a part of the image that was read.
    fn add(&mut self, start: u64, data: &[u8]) {
        let mut at = 0;
        for run in nonzero_runs(data) {
            self.add_zeroes(start + at as u64..start + run.start as u64);
            self.end_zeroes();
            let record = self.encoder.data(start + run.start as u64, &data[run.clone()]);
            self.put(&record);
            self.put(&data[run.clone()]);
            self.exported.data_bytes += run.len() as u64;
            at = run.end;
        }
        self.add_zeroes(start + at as u64..start + data.len() as u64);
    }

    /// Adds zeroes behind all that was added.
    fn add_zeroes(&mut self, range: Range<u64>) {
        if range.is_empty() || self.skips_zeroes {
            return;
        }
        if self.zeroes.end == range.start && !self.zeroes.is_empty() {
            self.zeroes.end = range.end;
            return;
        }
        self.end_zeroes();
        self.zeroes = range;
    }

    fn end_zeroes(&mut self) {
        let zeroes = take(&mut self.zeroes);
        if !zeroes.is_empty() {
            let length = zeroes.end - zeroes.start;
            let record = self.encoder.zeroes(zeroes.start, length);
            self.put(&record);
            self.exported.zero_bytes += length;
        }
    }

    fn end(&mut self) {
        self.end_zeroes();
        let record = self.encoder.end();
        self.put(&record);
    }
}

#[cfg(test)]
mod tests {
    use wire_store::DiffRecord;

    use super::*;
    use crate::diff::stream::{DiffPiece, DiffReader};

    fn header(from: bool) -> DiffHeader {
        let snapshot = |name: &str| DiffSnapshot { id: [1; 16], bytes: 8 << 20, name: name.to_string() };
        let from = from.then(|| snapshot("a"));
        DiffHeader {
            image: [2; 16],
            image_name: "vol".to_string(),
            to: snapshot("b"),
            from,
            created: 1,
            chain: 2,
        }
    }

    fn pieces(mut records: DiffRecords) -> Vec<String> {
        records.end();
        let stream_bytes = records.exported.stream_bytes;
        assert_eq!(stream_bytes, records.bytes.len() as u64);
        let mut reader = DiffReader::new(&records.bytes[..]);
        let mut pieces = Vec::new();
        loop {
            match reader.next().unwrap() {
                DiffPiece::Header(_) => {}
                DiffPiece::Data { offset, data } => pieces.push(format!("{offset}+{}", data.len())),
                DiffPiece::Zeroes { offset, length } => pieces.push(format!("{offset}-{length}")),
                DiffPiece::End => return pieces,
            }
        }
    }

    #[test]
    fn zeroes_that_follow_each_other_are_one_record() {
        let block = BLOCK_BYTES as u64;
        let fill = |has_from: bool| {
            let header = header(has_from);
            let mut records = DiffRecords::new(&header, DiffPosition::default());
            records.put(&header.encode());
            let mut data = vec![0; 4 * BLOCK_BYTES];
            data[BLOCK_BYTES] = 1;
            records.add(0, &data);
            records.add_zeroes(4 * block..6 * block);
            records.add(6 * block, &[0; BLOCK_BYTES]);
            records.add_zeroes(9 * block..10 * block);
            records.add(10 * block, &[1; BLOCK_BYTES]);
            records
        };
        let all = ["0-4096", "4096+4096", "8192-20480", "36864-4096", "40960+4096"];
        assert_eq!(pieces(fill(true)), all);
        assert_eq!(fill(true).exported.data_bytes, 2 * block);
        // What is zero in a new image takes nothing.
        assert_eq!(pieces(fill(false)), [all[1], all[4]]);
    }

    #[test]
    fn a_stream_goes_on_where_a_record_may_end() {
        let bytes = 9_000_448;
        for offset in [0, 4096, 8_998_912, bytes] {
            assert!(check_position(offset, bytes).is_ok(), "{offset}");
        }
        for offset in [512, 8_998_912 + 512, bytes - 512, bytes + 512, 9_003_008] {
            let error = check_position(offset, bytes).unwrap_err().to_string();
            assert!(error.contains(&format!("ends at its byte {offset}")), "{error}");
        }
    }

    #[test]
    fn records_of_data_are_as_large_as_reads() {
        assert_eq!(DiffRecord::DATA_BYTES_MAX, store_image::TRANSFER_BYTES_MAX as usize);
    }
}
