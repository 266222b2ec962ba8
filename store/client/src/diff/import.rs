//! Brings an image up to date with a stream of differences.
//!
//! The record of the image says from the first write on which stream its head has a part of, and up to where.
//! Until it has all, no client opens the image, and no other stream is applied to it. The blocks of a stream
//! have the contents of the snapshot that it leads to, so that the same one can be applied again from any
//! offset on.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeSet, VecDeque};
use std::io::Read;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use bdev::{Access, AsyncChannel, Registry};
use cluster_map::{
    ImageEntry, ImageSnapshot, ParentVolume, TrashedImage, UnfinishedImport, check_snapshot_name, parents_of,
    random_volume,
};
use reactor::Core;
use store_image::IMAGE_BLOCK_BYTES;
use uuid::Uuid;
use wire_store::{DiffHeader, DiffSnapshot, OBJECT_BYTES};

use super::DiffError;
use super::stream::{DiffPiece, DiffReader, FileThread};
use super::turns::LaneWait;
use crate::copy::ImageName;
use crate::lanes::{LANES, Lane, run_lanes};
use crate::layers::FoundImage;
use crate::reclaim::{Emptied, ReclaimError, sweep};
use crate::snapshots::{check_limits, rollback_image};
use crate::sweep::SweepKind;
use crate::trash::{TRASH, purge_image, trash};
use crate::{ClientError, Cluster, ClusterImage, check_plain_name, check_size};

/// The record of the image says this often up to where the stream is applied.
const SAVE_EVERY: Duration = Duration::from_secs(5);
/// Pieces of the stream that wait for a lane: memory for 128 KiB each.
const WAITING_MAX: usize = LANES;

/// How a stream is imported.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ImportOptions {
    /// What the image has since its newest snapshot is removed, and what it has of another stream.
    pub discard_changes: bool,
}

/// What an import has done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImportedDiff {
    /// The snapshot that the image has now.
    pub snapshot: String,
    /// Size of the image in bytes.
    pub bytes: u64,
    /// Bytes of data that were written.
    pub written_bytes: u64,
    /// Bytes that were zeroed.
    pub zeroed_bytes: u64,
    /// The image has had what the stream has before this offset, from an import that was interrupted.
    pub resumed_at: u64,
}

/// Applies a stream to an image, which no other client has attached. A stream of everything makes the image.
/// When it is whole, the image has the snapshot that it leads to. `progress` gets the offset in the image
/// that was read, and the size of the image.
///
/// # Errors
/// [`DiffError::Unfinished`] if the image has a part of the stream. With any other error it is as it was.
pub async fn import_diff<R: Read + Send + 'static>(
    core: &Core,
    to: ImageName<'_>,
    stream: R,
    options: ImportOptions,
    mut progress: impl FnMut(u64, u64),
) -> Result<ImportedDiff, DiffError> {
    check_plain_name(to.name)?;
    let file = FileThread::new(DiffReader::new(stream))?;
    let header = match file.run(DiffReader::next).await?? {
        DiffPiece::Header(header) => *header,
        _ => return Err(DiffError::Truncated { at: 0 }),
    };
    check_size(header.to.bytes)?;
    check_snapshot_name(&header.to.name)?;
    let target = match &header.from {
        Some(from) => ImportTarget::of_image(core, to, &header, from, options).await?,
        None => ImportTarget::new_image(core, to, &header).await?,
    };
    let started = StartedImport::new(to, &header, target)?;
    let imported = async {
        let applied = started.apply(core, &file, &mut progress).await?;
        started.finish()?;
        Ok(applied)
    };
    let imported: Result<AppliedBytes, DiffError> = imported.await;
    started.image.detach();
    let applied = imported.map_err(|source| started.unfinished(source))?;
    Ok(ImportedDiff {
        snapshot: header.to.name.clone(),
        bytes: header.to.bytes,
        written_bytes: applied.written_bytes,
        zeroed_bytes: applied.zeroed_bytes,
        resumed_at: started.resumed_at,
    })
}

fn now_s() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |now| now.as_secs())
}

fn id_of(snapshot: &DiffSnapshot) -> Uuid {
    Uuid::from_bytes(snapshot.id)
}

/// The mark of a stream in the record of an image, at its begin.
fn mark_of(header: &DiffHeader) -> UnfinishedImport {
    let from = header.from.as_ref().map(id_of);
    UnfinishedImport { from, to: id_of(&header.to), name: header.to.name.clone(), done: 0 }
}

/// Whether the mark is of this stream.
fn is_of(mark: &UnfinishedImport, header: &DiffHeader) -> bool {
    let stream = mark_of(header);
    (mark.from, mark.to) == (stream.from, stream.to)
}

fn change(
    cluster: &Cluster,
    pool: &str,
    name: &str,
    from: &ImageEntry,
    to: &ImageEntry,
) -> Result<(), ClientError> {
    match cluster.map().change_image(pool, name, from, to)? {
        true => Ok(()),
        false => Err(ClientError::Changed { pool: pool.to_string(), image: name.to_string() }),
    }
}

/// The name in the trash of an image that is not whole.
fn unfinished_name(name: &str) -> String {
    format!("{name} (unfinished import)")
}

/// Whether a stream fits an image, by its record.
#[derive(Clone, Debug, PartialEq, Eq)]
enum ImportState {
    /// Its head is to have no objects.
    AtSnapshot,
    /// It has a part of this stream.
    Started,
    /// It was changed since its newest snapshot.
    Changed,
    /// It has a part of the stream that leads to this snapshot.
    OtherImport(String),
}

/// The newest snapshot of an image, which is the one that a stream begins at.
fn base_of<'a>(
    entry: &'a ImageEntry,
    (pool, name): (&str, &str),
    header: &DiffHeader,
    from: &DiffSnapshot,
) -> Result<&'a ImageSnapshot, DiffError> {
    let (pool, image) = (pool.to_string(), name.to_string());
    if entry.layers.snapshot(&header.to.name).is_some() {
        return Err(DiffError::Imported { pool, image, to: header.to.name.clone() });
    }
    let Some(newest) = entry.layers.snapshots.last().filter(|newest| newest.name == from.name) else {
        let newest = entry.layers.snapshots.last().map_or("none", |newest| &newest.name).to_string();
        return Err(DiffError::OtherBase { pool, image, from: from.name.clone(), newest });
    };
    let own = Uuid::from_u128(entry.uuid.as_u128() ^ u128::from(newest.volume));
    let is_it = newest.origin.is_none_or(|origin| origin == id_of(from)) || own == id_of(from);
    if !is_it || newest.bytes != from.bytes {
        return Err(DiffError::ForeignBase { pool, image, from: from.name.clone() });
    }
    Ok(newest)
}

fn state_of(entry: &ImageEntry, newest: &ImageSnapshot, header: &DiffHeader) -> ImportState {
    let at_snapshot = Some(ParentVolume { volume: newest.volume, bytes: newest.bytes });
    match &entry.layers.import {
        Some(mark) if is_of(mark, header) => ImportState::Started,
        Some(mark) => ImportState::OtherImport(mark.name.clone()),
        None if entry.layers.parent == at_snapshot && entry.bytes == newest.bytes => ImportState::AtSnapshot,
        None => ImportState::Changed,
    }
}

/// An image that a stream is applied to: attached, with the mark of the stream in its record.
struct ImportTarget {
    held: Emptied,
    map_name: String,
    entry: ImageEntry,
}

impl ImportTarget {
    /// An image with the snapshot that the stream begins at.
    async fn of_image(
        core: &Core,
        to: ImageName<'_>,
        header: &DiffHeader,
        from: &DiffSnapshot,
        options: ImportOptions,
    ) -> Result<ImportTarget, DiffError> {
        let ImageName { cluster, pool, name } = to;
        let find = || match cluster.image(pool, name) {
            Err(ClientError::NoImage { pool, image }) => {
                Err(DiffError::NoBaseImage { pool, image, from: from.name.clone() })
            }
            found => Ok(found?),
        };
        let mut entry = find()?;
        let newest = base_of(&entry, (pool, name), header, from)?.clone();
        let images = cluster.map().images()?;
        check_limits(&images, pool, name, &entry)?;
        if options.discard_changes {
            // What is discarded may stand on fewer volumes, or on none.
            check_limits(&images, pool, name, &entry.rolled_back(&newest, entry.volume))?;
        }
        if header.to.bytes < entry.bytes {
            entry.check_unprotected(pool, name)?;
        }
        let mut held = Emptied::new(cluster, pool, name, &entry, false)?;
        let mut state = state_of(&entry, &newest, header);
        let checked = check_head(core, &held, &entry, &mut state).await;
        let (pool_name, image) = (pool.to_string(), name.to_string());
        let refused = match (checked, &state) {
            (Err(error), _) => Some(error),
            (Ok(()), ImportState::AtSnapshot | ImportState::Started) => None,
            (Ok(()), _) if options.discard_changes => {
                held.detach();
                rollback_image(core, cluster, (pool, name), &newest.name, false).await?;
                entry = find()?;
                held = Emptied::new(cluster, pool, name, &entry, false)?;
                state = state_of(&entry, &newest, header);
                check_head(core, &held, &entry, &mut state).await.err().or_else(|| {
                    let changed = ClientError::Changed { pool: pool_name, image };
                    (state != ImportState::AtSnapshot).then_some(changed.into())
                })
            }
            (Ok(()), ImportState::OtherImport(other)) => {
                Some(DiffError::OtherImport { pool: pool_name, image, other: other.clone() })
            }
            (Ok(()), ImportState::Changed) => {
                Some(DiffError::HeadChanged { pool: pool_name, image, newest: newest.name.clone() })
            }
        };
        if let Some(error) = refused {
            held.detach();
            return Err(error);
        }
        let entry = match state {
            ImportState::Started => Ok(entry),
            _ => begin(cluster, pool, name, &entry, header),
        };
        match entry {
            Ok(entry) => Ok(ImportTarget { held, map_name: name.to_string(), entry }),
            Err(error) => {
                held.detach();
                Err(error)
            }
        }
    }

    /// An image that is made for the stream, or was by an import of it that was interrupted. It is in the
    /// trash, where nothing keeps it.
    async fn new_image(
        core: &Core,
        to: ImageName<'_>,
        header: &DiffHeader,
    ) -> Result<ImportTarget, DiffError> {
        let ImageName { cluster, pool, name } = to;
        let images = cluster.map().images()?;
        // Between two names it has the one that it is to have.
        let is_unfinished = |image: &ImageEntry| {
            image.trashed.as_ref().is_some_and(|trashed| trashed.name == unfinished_name(name))
        };
        if images.get(&(pool.to_string(), name.to_string())).is_some_and(|image| !is_unfinished(image)) {
            return Err(DiffError::ImageExists { pool: pool.to_string(), image: name.to_string() });
        }
        for entry in trash(cluster)?.into_iter().filter(|it| it.pool == pool && is_unfinished(&it.image)) {
            if entry.image.layers.import.as_ref().is_some_and(|mark| is_of(mark, header)) {
                return ImportTarget::attached(core, to, entry.map_name, entry.image).await;
            }
            purge_image(core, cluster, &entry, |_, _| {}).await?;
        }
        let map_name = format!("{TRASH}import.{}", Uuid::new_v4().simple());
        let image = cluster.map().create_image(pool, &map_name, header.to.bytes)?;
        let mut entry = image.clone();
        entry.trashed = Some(TrashedImage { name: unfinished_name(name), until: now_s() });
        entry.layers.import = Some(mark_of(header));
        change(cluster, pool, &map_name, &image, &entry)?;
        ImportTarget::attached(core, to, map_name, entry).await
    }

    /// An image with the mark of the stream, of which all groups refuse what others have in flight.
    async fn attached(
        core: &Core,
        to: ImageName<'_>,
        map_name: String,
        entry: ImageEntry,
    ) -> Result<ImportTarget, DiffError> {
        let held = Emptied::new(to.cluster, to.pool, &map_name, &entry, false)?;
        let fenced = held.fence(core, entry.volume).await;
        fenced.inspect_err(|_| held.detach())?;
        Ok(ImportTarget { held, map_name, entry })
    }
}

/// Looks whether the head of an image that is at its newest snapshot has objects. All groups refuse what
/// others have in flight afterwards.
async fn check_head(
    core: &Core,
    held: &Emptied,
    entry: &ImageEntry,
    state: &mut ImportState,
) -> Result<(), DiffError> {
    held.fence(core, entry.volume).await?;
    if *state == ImportState::AtSnapshot {
        let kind = SweepKind::Indices { end: entry.bytes.div_ceil(OBJECT_BYTES as u64) };
        let attach = held.attachment.state.clone();
        let swept = sweep(core, held.watch.clone(), entry.volume, attach, kind, |_, _| {}).await;
        if !swept.map_err(ReclaimError::of_list)?.indices.is_empty() {
            *state = ImportState::Changed;
        }
    }
    Ok(())
}

/// Marks an image whose head is empty, and gives it its size.
fn begin(
    cluster: &Cluster,
    pool: &str,
    name: &str,
    entry: &ImageEntry,
    header: &DiffHeader,
) -> Result<ImageEntry, DiffError> {
    let mut begun = entry.cut_to(header.to.bytes.min(entry.bytes));
    begun.bytes = header.to.bytes;
    begun.layers.import = Some(mark_of(header));
    change(cluster, pool, name, entry, &begun)?;
    Ok(begun)
}

/// An import that was begun.
struct StartedImport<'a> {
    to: ImageName<'a>,
    header: &'a DiffHeader,
    map_name: String,
    /// As the map has it.
    entry: RefCell<ImageEntry>,
    image: Arc<ClusterImage>,
    resumed_at: u64,
}

impl<'a> StartedImport<'a> {
    fn new(
        to: ImageName<'a>,
        header: &'a DiffHeader,
        target: ImportTarget,
    ) -> Result<StartedImport<'a>, DiffError> {
        let ImportTarget { held, map_name, entry } = target;
        let images = to.cluster.map().images();
        let parents = images.and_then(|images| parents_of(&images, to.pool, entry.layers.parent));
        let parents = parents.inspect_err(|_| held.detach())?;
        let found = FoundImage { entry: entry.clone(), image: map_name.clone(), snapshot: None, parents };
        let image = Arc::new(ClusterImage::of_attached(to.pool, &found, held));
        let resumed_at = entry.layers.import.as_ref().map_or(0, |mark| mark.done);
        Ok(StartedImport { to, header, map_name, entry: RefCell::new(entry), image, resumed_at })
    }

    /// Writes the stream to the image. What was taken before an error is written, and the record says so.
    async fn apply<R: Read + Send + 'static>(
        &self,
        core: &Core,
        file: &FileThread<DiffReader<R>>,
        progress: &mut impl FnMut(u64, u64),
    ) -> Result<AppliedBytes, DiffError> {
        let registry = Registry::new();
        registry.register("to", None, &[], self.image.clone())?;
        // It is open for as long as there is I/O.
        let descriptor = registry.open("to", Access::ReadWrite)?;
        let applying = ApplyingDiff {
            begun: self,
            core: core.clone(),
            channel: AsyncChannel::new(core, descriptor.channel(core)?),
            pieces: RefCell::default(),
            unwritten: RefCell::default(),
            read_to: Cell::new(0),
            is_read: Cell::new(false),
            failed: RefCell::new(None),
            waiting: LaneWait::default(),
            applied: Cell::default(),
            saved: Cell::new(Instant::now()),
        };
        let mut lanes: Vec<Lane<'_, DiffError>> = vec![Box::pin(applying.read_stream(file))];
        for _ in 0..LANES {
            lanes.push(Box::pin(applying.write_pieces()));
        }
        let written = run_lanes(lanes, || progress(applying.read_to.get(), self.header.to.bytes)).await;
        let failed = written.err().or_else(|| applying.failed.borrow_mut().take());
        match failed {
            None => Ok(applying.applied.get()),
            Some(error) => {
                self.save(applying.written_to());
                Err(error)
            }
        }
    }

    /// Has the record say up to where the stream is written. It matters only for how long a later import
    /// takes.
    fn save(&self, done: u64) {
        let mut to = self.entry.borrow().clone();
        match &mut to.layers.import {
            Some(mark) if mark.done < done => mark.done = done,
            _ => return,
        }
        let known = self.entry.borrow().clone();
        match change(self.to.cluster, self.to.pool, &self.map_name, &known, &to) {
            Ok(()) => drop(self.entry.replace(to)),
            Err(error) => log::debug!("how far an import is: {error}"),
        }
    }

    /// Makes the snapshot. From here on the image is whole.
    fn finish(&self) -> Result<(), DiffError> {
        let ImageName { cluster, pool, name } = self.to;
        // Others may have protected it meanwhile.
        let found = cluster.map().images()?.remove(&(pool.to_string(), self.map_name.clone()));
        let is_it = |entry: &ImageEntry| {
            let mark = entry.layers.import.as_ref();
            entry.volume == self.entry.borrow().volume && mark.is_some_and(|mark| is_of(mark, self.header))
        };
        let changed = || ClientError::Changed { pool: pool.to_string(), image: name.to_string() };
        let entry = found.filter(is_it).ok_or_else(changed)?;
        if self.map_name != name && entry.trashed.is_some() {
            cluster.map().rename_image(pool, &self.map_name, name, Some(&entry))?;
        }
        let DiffHeader { to, created, .. } = self.header;
        let mut whole = entry.imported(&to.name, *created, id_of(to), random_volume());
        whole.trashed = None;
        Ok(change(cluster, pool, name, &entry, &whole)?)
    }

    /// Says what to do with an image that has a part of a stream.
    fn unfinished(&self, source: DiffError) -> DiffError {
        let ImageName { pool, name, .. } = self.to;
        let advice = match &self.header.from {
            Some(from) => format!(
                "import the whole stream again, which goes on, or take the part back (`ringbolt image \
                 snapshot rollback {name}@{}`)",
                from.name
            ),
            None => "it is in the trash; import the whole stream again, which goes on, or remove it \
                     (`ringbolt image purge --expired`)"
                .to_string(),
        };
        let (pool, image) = (pool.to_string(), name.to_string());
        DiffError::Unfinished { pool, image, advice, source: Box::new(source) }
    }
}

/// What was written.
#[derive(Clone, Copy, Default)]
struct AppliedBytes {
    written_bytes: u64,
    zeroed_bytes: u64,
}

/// A piece of the stream that is to be written.
struct WaitingPiece {
    offset: u64,
    length: u64,
    /// `None` for zeroes.
    data: Option<Vec<u8>>,
}

/// What the lanes share.
struct ApplyingDiff<'a> {
    begun: &'a StartedImport<'a>,
    core: Core,
    channel: AsyncChannel,
    pieces: RefCell<VecDeque<WaitingPiece>>,
    /// Where the pieces are that were read and are not written.
    unwritten: RefCell<BTreeSet<u64>>,
    /// Where the last piece ends that was read.
    read_to: Cell<u64>,
    is_read: Cell<bool>,
    /// What is wrong with the stream.
    failed: RefCell<Option<DiffError>>,
    waiting: LaneWait,
    applied: Cell<AppliedBytes>,
    saved: Cell<Instant>,
}

impl ApplyingDiff<'_> {
    /// What the stream has before this offset is written.
    fn written_to(&self) -> u64 {
        self.unwritten.borrow().first().copied().unwrap_or(self.read_to.get())
    }

    /// Reads the stream. What was read before an error is still written.
    async fn read_stream<R: Read + Send + 'static>(
        &self,
        file: &FileThread<DiffReader<R>>,
    ) -> Result<(), DiffError> {
        let read = self.read_pieces(file).await;
        *self.failed.borrow_mut() = read.err();
        self.is_read.set(true);
        self.waiting.notify();
        Ok(())
    }

    async fn read_pieces<R: Read + Send + 'static>(
        &self,
        file: &FileThread<DiffReader<R>>,
    ) -> Result<(), DiffError> {
        loop {
            let piece = match file.run(DiffReader::next).await?? {
                DiffPiece::Data { offset, data } => {
                    WaitingPiece { offset, length: data.len() as u64, data: Some(data) }
                }
                DiffPiece::Zeroes { offset, length } => WaitingPiece { offset, length, data: None },
                DiffPiece::Header(_) => continue,
                DiffPiece::End => return Ok(()),
            };
            let (offset, end) = (piece.offset, piece.offset + piece.length);
            if end > self.begun.resumed_at {
                self.waiting.until(|| self.pieces.borrow().len() < WAITING_MAX).await;
                self.unwritten.borrow_mut().insert(offset);
                self.pieces.borrow_mut().push_back(piece);
                self.waiting.notify();
            }
            self.read_to.set(end);
            if self.saved.get().elapsed() >= SAVE_EVERY {
                self.begun.save(self.written_to());
                self.saved.set(Instant::now());
            }
        }
    }

    async fn write_pieces(&self) -> Result<(), DiffError> {
        loop {
            self.waiting.until(|| !self.pieces.borrow().is_empty() || self.is_read.get()).await;
            let Some(piece) = self.pieces.borrow_mut().pop_front() else { return Ok(()) };
            self.waiting.notify();
            let offset = piece.offset;
            self.write(piece).await?;
            self.unwritten.borrow_mut().remove(&offset);
        }
    }

    async fn write(&self, WaitingPiece { offset, length, data }: WaitingPiece) -> Result<(), DiffError> {
        let block = u64::from(IMAGE_BLOCK_BYTES);
        match data {
            Some(data) => {
                let mut buffer = self.core.pool().take(data.len()).ok_or(DiffError::NoMemory)?;
                buffer.as_mut_slice().copy_from_slice(&data);
                let written = self.channel.write(offset / block, buffer).await;
                written.map_err(|(status, _)| DiffError::Write(status))?;
                self.count(length, 0);
            }
            None => {
                let mut at = offset;
                while at < offset + length {
                    let object_end = (at / OBJECT_BYTES as u64 + 1) * OBJECT_BYTES as u64;
                    let end = object_end.min(offset + length);
                    let zeroed = self.channel.write_zeroes(at / block, ((end - at) / block) as u32).await;
                    zeroed.map_err(DiffError::Write)?;
                    at = end;
                }
                self.count(0, length);
            }
        }
        Ok(())
    }

    fn count(&self, written: u64, zeroed: u64) {
        let AppliedBytes { written_bytes, zeroed_bytes } = self.applied.get();
        let (written_bytes, zeroed_bytes) = (written_bytes + written, zeroed_bytes + zeroed);
        self.applied.set(AppliedBytes { written_bytes, zeroed_bytes });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(from: Option<(u8, u64, &str)>, to: (u8, u64, &str)) -> DiffHeader {
        let snapshot =
            |(id, bytes, name): (u8, u64, &str)| DiffSnapshot { id: [id; 16], bytes, name: name.to_string() };
        let (to, from, image_name) = (snapshot(to), from.map(snapshot), "vol".to_string());
        DiffHeader { image: [9; 16], image_name, to, from, created: 5, chain: 0 }
    }

    /// An image with the copy of a snapshot `a`, whose identity is all ones.
    fn image() -> ImageEntry {
        let origin = Uuid::from_bytes([1; 16]);
        ImageEntry::new(Uuid::from_u128(77), 1, 4096).imported("a", 5, origin, 2)
    }

    fn base(entry: &ImageEntry, header: &DiffHeader) -> Result<String, String> {
        let from = header.from.as_ref().unwrap();
        let base = base_of(entry, ("p", "vol"), header, from).map(|base| base.name.clone());
        base.map_err(|error| error.to_string())
    }

    #[test]
    fn a_stream_fits_the_copy_of_the_snapshot_that_it_begins_at() {
        let image = image();
        let of = |id: u8, bytes: u64, name: &str| header(Some((id, bytes, name)), (2, 8192, "b"));
        assert_eq!(base(&image, &of(1, 4096, "a")), Ok("a".to_string()));
        assert!(base(&image, &of(1, 4096, "z")).unwrap_err().contains("the newest one of image p/vol is a"));
        assert!(base(&image, &of(3, 4096, "a")).unwrap_err().contains("the copy of another snapshot"));
        assert!(base(&image, &of(1, 512, "a")).unwrap_err().contains("the copy of another snapshot"));
        let again = header(Some((1, 4096, "a")), (1, 4096, "a"));
        assert_eq!(base(&image, &again).unwrap_err(), "image p/vol has a snapshot a already");
        // A snapshot that was not imported is taken by its name, and one of the image itself by its identity.
        let mut own = image.clone();
        own.layers.snapshots[0].origin = None;
        assert_eq!(base(&own, &of(3, 4096, "a")), Ok("a".to_string()));
        let mut of_own = of(0, 4096, "a");
        of_own.from.as_mut().unwrap().id = Uuid::from_u128(77 ^ 1).into_bytes();
        assert_eq!(base(&image, &of_own), Ok("a".to_string()));
        let none = ImageEntry::new(Uuid::from_u128(77), 1, 4096);
        assert!(
            base(&none, &of(1, 4096, "a")).unwrap_err().contains("the newest one of image p/vol is none")
        );
    }

    #[test]
    fn the_record_says_what_was_changed_since_the_snapshot() {
        let stream = header(Some((1, 4096, "a")), (2, 8192, "b"));
        let state = |image: &ImageEntry| state_of(image, &image.layers.snapshots[0], &stream);
        let clean = image();
        assert_eq!(state(&clean), ImportState::AtSnapshot);
        assert_eq!(state(&ImageEntry { bytes: 8192, ..clean.clone() }), ImportState::Changed);
        // Its end was cut off, and is back.
        let cut = ImageEntry { bytes: 4096, ..clean.cut_to(512) };
        assert_eq!(state(&cut), ImportState::Changed);
        let mut begun = clean.clone();
        begun.layers.import = Some(UnfinishedImport { done: 7, ..mark_of(&stream) });
        assert_eq!(state(&begun), ImportState::Started);
        let other = header(Some((1, 4096, "a")), (3, 8192, "c"));
        begun.layers.import = Some(mark_of(&other));
        assert_eq!(state(&begun), ImportState::OtherImport("c".to_string()));
        // Back at the snapshot it has no part of a stream.
        let back = begun.rolled_back(&begun.layers.snapshots[0], 8);
        assert_eq!(state(&back), ImportState::AtSnapshot);
    }
}
