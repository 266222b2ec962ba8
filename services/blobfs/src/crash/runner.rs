//! A run: requests and power failures, by a seed.

use std::collections::BTreeMap;

use blobstore::{BlobStoreDevice, BlobStoreFormat};
use random::WyRand;

use super::disk::Disk;
use super::model::{Model, ModelFile, Op};
use crate::error::BlobFsError;
use crate::fs::{BlobFs, BlobFsOptions, FileFault, format_options};
use crate::request::{BlobFsReply, BlobFsRequest, BlobFsRequestId, OpenHow, OpenNumber};

const CLUSTER_BYTES: u32 = 16 << 10;
const DEVICE_BYTES: u64 = 2 << 20;
/// Requests in flight: with each, there are twice as many states that are right.
const REQUESTS_MAX: usize = 3;
const NAMES: [&str; 7] = ["a", "b", "c", "x/a", "x/b", "y/a", "y/b"];
const SIZES: [usize; 9] = [1, 100, 511, 512, 513, 4096, 5000, 16_384, 40_000];

/// How a run is.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct RunOptions {
    pub(super) fault: Option<FileFault>,
    /// Steps before the power failure; by the seed if not given.
    pub(super) steps: Option<usize>,
}

struct Run {
    random: WyRand,
    disk: Disk,
    fs: BlobFs,
    model: Model,
    /// Openers, by the name that their file has.
    open: BTreeMap<String, OpenNumber>,
    /// Openers of files without a name, and what these have.
    nameless: Vec<(OpenNumber, Vec<u8>)>,
    requests: BTreeMap<BlobFsRequestId, Op>,
}

fn options() -> BlobFsOptions {
    BlobFsOptions { cache_bytes: 128 << 10, read_ahead_bytes: 64 << 10, preallocate_bytes: 48 << 10 }
}

/// Runs a seed.
pub(super) fn run_seed(seed: u64, run_options: RunOptions) -> Result<(), String> {
    let mut random = WyRand::new(seed);
    let device = BlobStoreDevice {
        bytes: DEVICE_BYTES,
        block_bytes: if random.happens(300) { 4096 } else { 512 },
        has_volatile_cache: random.happens(700),
        atomic_write_bytes: if random.happens(200) { 4096 } else { 512 },
    };
    let format =
        BlobStoreFormat { cluster_bytes: CLUSTER_BYTES, metadata_pages_percent: 100, ..format_options() };
    let fs = BlobFs::format(&format, device, options()).map_err(|error| error.to_string())?;
    let mut run = Run {
        random,
        disk: Disk::new(device),
        fs,
        model: Model::default(),
        open: BTreeMap::new(),
        nameless: Vec::new(),
        requests: BTreeMap::new(),
    };
    run.drain()?;
    run.request(BlobFsRequest::MakeDirectory { path: b"x".to_vec() })?;
    for _ in 0..3 {
        if let Some(fault) = run_options.fault {
            run.fs.plant(fault);
        }
        let steps = run_options.steps.unwrap_or(20 + run.random.index(400));
        for _ in 0..steps {
            run.step()?;
        }
        run.crash()?;
    }
    run.close()
}

impl Run {
    /// Begins what the files ask for.
    fn begin_io(&mut self) {
        while let Some(io) = self.fs.next_io() {
            self.disk.begin(io.id, io.action);
        }
    }

    fn complete(&mut self, id: u64) -> Result<(), String> {
        let data = self.disk.complete(id);
        self.fs.complete(id, Ok(data));
        self.begin_io();
        self.take_replies()
    }

    /// Completes everything.
    fn drain(&mut self) -> Result<(), String> {
        self.begin_io();
        self.take_replies()?;
        while let Some(id) = self.disk.in_flight().first().copied() {
            self.complete(id)?;
        }
        match self.fs.is_idle() && self.requests.is_empty() {
            true => Ok(()),
            false => Err("something waits for nothing".to_string()),
        }
    }

    /// Runs a request that is not in the model, with all others ended before.
    fn request(&mut self, request: BlobFsRequest) -> Result<BlobFsReply, String> {
        self.drain()?;
        let id = self.fs.begin(request);
        loop {
            self.begin_io();
            if let Some((ended, result)) = self.fs.next_reply() {
                return match ended == id {
                    true => result.map_err(|error| error.to_string()),
                    false => Err("another request ended".to_string()),
                };
            }
            let Some(io) = self.disk.in_flight().first().copied() else {
                return Err("a request waits for nothing".to_string());
            };
            let data = self.disk.complete(io);
            self.fs.complete(io, Ok(data));
        }
    }

    fn step(&mut self) -> Result<(), String> {
        let in_flight = self.disk.in_flight();
        if !in_flight.is_empty() && (self.requests.len() >= REQUESTS_MAX || !self.random.happens(150)) {
            let id = in_flight[self.random.index(in_flight.len())];
            return self.complete(id);
        }
        if self.requests.len() >= REQUESTS_MAX {
            return Ok(());
        }
        let Some(op) = self.random_op() else { return Ok(()) };
        let names = op.names();
        let is_busy = |other: &Op| {
            let others = other.names();
            others.is_empty() || names.is_empty() || others.iter().any(|name| names.contains(name))
        };
        if self.requests.values().any(is_busy) {
            return Ok(());
        }
        let path = |name: &str| name.as_bytes().to_vec();
        let opener = |name: &str| self.open.get(name).copied();
        let request = match &op {
            Op::Create { name } => {
                let how = if self.random.happens(500) { OpenHow::CREATE } else { OpenHow::REPLACE };
                BlobFsRequest::Open { path: path(name), how }
            }
            Op::Append { name, data } => {
                let Some(open) = opener(name) else { return Ok(()) };
                BlobFsRequest::Append { open, data: data.clone() }
            }
            Op::Write { name, offset, data } => {
                let Some(open) = opener(name) else { return Ok(()) };
                BlobFsRequest::Write { open, offset: *offset as u64, data: data.clone() }
            }
            Op::Truncate { name, size } => {
                let Some(open) = opener(name) else { return Ok(()) };
                BlobFsRequest::Truncate { open, size: *size as u64 }
            }
            Op::Sync { name } => {
                let Some(open) = opener(name) else { return Ok(()) };
                BlobFsRequest::Sync { open }
            }
            Op::SyncLog { name } => {
                let Some(open) = opener(name) else { return Ok(()) };
                BlobFsRequest::SyncLog { open }
            }
            Op::Read { name, offset, length } => {
                let Some(open) = opener(name) else { return Ok(()) };
                BlobFsRequest::Read { open, offset: *offset as u64, length: *length }
            }
            Op::Close { name } => {
                let Some(open) = self.open.remove(name) else { return Ok(()) };
                BlobFsRequest::Close { open }
            }
            Op::Rename { from, to } => BlobFsRequest::Rename { from: path(from), to: path(to) },
            Op::Unlink { name } => BlobFsRequest::Unlink { path: path(name) },
            Op::RenameDirectory { from, to } => BlobFsRequest::Rename { from: path(from), to: path(to) },
        };
        self.model.begin(&op);
        let id = self.fs.begin(request);
        self.requests.insert(id, op);
        self.begin_io();
        self.take_replies()
    }

    fn random_op(&mut self) -> Option<Op> {
        let name = NAMES[self.random.index(NAMES.len())].to_string();
        let size = SIZES[self.random.index(SIZES.len())];
        let byte = self.random.next_bits() as u8 | 1;
        let data = |random: &mut WyRand| [byte, random.next_bits() as u8 | 1].repeat(size.div_ceil(2));
        let file = self.model.files.get(&name);
        let length = file.map_or(0, |file| file.current.len());
        if !self.open.contains_key(&name) && self.random.happens(400) {
            // A file that is opened once more is as it was; only new ones are created here.
            if file.is_some() {
                return self.reopen(name);
            }
            return Some(Op::Create { name });
        }
        // A log goes on being one for a while.
        if let Some(file) = file.filter(|file| file.is_log && self.open.contains_key(&name))
            && self.random.happens(500)
        {
            return Some(match file.durable.as_ref() == Some(&file.current) {
                true => Op::Append { data: data(&mut self.random), name },
                false => Op::SyncLog { name },
            });
        }
        Some(match self.random.below(15) {
            0..3 if length < 150_000 => Op::Append { data: data(&mut self.random), name },
            3..5 => {
                let offset = self.random.index(length + 2000);
                let mut data = data(&mut self.random);
                // Half of them leave the size as it is.
                if offset < length && self.random.happens(500) {
                    data.truncate(length - offset);
                }
                Op::Write { name, offset, data }
            }
            5 => Op::Truncate { name, size: self.random.index(length + 3000) },
            6..8 => Op::Sync { name },
            8 => Op::SyncLog { name },
            9..11 => {
                Op::Read { name, offset: if self.random.happens(500) { 0 } else { length / 2 }, length: size }
            }
            11 => Op::Close { name },
            12 => {
                let to = NAMES[self.random.index(NAMES.len())].to_string();
                if to == name {
                    return None;
                }
                Op::Rename { from: name, to }
            }
            13 => Op::Unlink { name },
            _ if self.random.happens(200) => {
                let (from, to) = if self.random.happens(500) { ("x", "y") } else { ("y", "x") };
                Op::RenameDirectory { from: from.into(), to: to.into() }
            }
            _ => {
                self.close_nameless();
                return None;
            }
        })
    }

    /// Opens a file that exists, at once: nothing is written.
    fn reopen(&mut self, name: String) -> Option<Op> {
        let is_used = |op: &Op| op.names().is_empty() || op.names().contains(&&name);
        if self.requests.values().any(is_used) {
            return None;
        }
        let id = self.fs.begin(BlobFsRequest::Open { path: name.as_bytes().to_vec(), how: OpenHow::WRITE });
        self.requests.insert(id, Op::Create { name });
        None
    }

    fn close_nameless(&mut self) {
        if let Some((open, _)) = self.nameless.pop() {
            self.fs.begin(BlobFsRequest::Close { open });
            self.begin_io();
        }
    }

    fn take_replies(&mut self) -> Result<(), String> {
        while let Some((id, result)) = self.fs.next_reply() {
            let Some(op) = self.requests.remove(&id) else { continue };
            self.ended(op, result)?;
        }
        Ok(())
    }

    fn ended(&mut self, op: Op, result: Result<BlobFsReply, BlobFsError>) -> Result<(), String> {
        match (&op, result) {
            (Op::Create { name }, Ok(BlobFsReply::Opened(open))) => {
                self.open.insert(name.clone(), open);
                if !self.model.files.contains_key(name) {
                    self.model.apply(&op);
                }
                return Ok(());
            }
            (Op::Read { name, offset, length }, Ok(BlobFsReply::Data(data))) => {
                let current = &self.model.files[name].current;
                let expected = current.get(*offset..).unwrap_or(&[]);
                return match data == expected[..expected.len().min(*length)] {
                    true => Ok(()),
                    false => Err(format!("{name}: {length} bytes at {offset} are read as others")),
                };
            }
            (Op::Rename { from, to }, Ok(_)) => {
                let moved = self.open.remove(from);
                if let Some(open) = self.open.remove(to) {
                    self.nameless.push((open, self.model.files[to].current.clone()));
                }
                self.open.extend(moved.map(|open| (to.clone(), open)));
            }
            (Op::Unlink { name }, Ok(_)) => {
                if let Some(open) = self.open.remove(name) {
                    self.nameless.push((open, self.model.files[name].current.clone()));
                }
            }
            (Op::RenameDirectory { from, to }, Ok(_)) => {
                let prefix = format!("{from}/");
                let moved = self.open.extract_if(.., |name, _| name.starts_with(&prefix));
                let moved: Vec<_> = moved.collect();
                let renamed = moved.into_iter();
                self.open
                    .extend(renamed.map(|(name, open)| (format!("{to}/{}", &name[prefix.len()..]), open)));
            }
            (_, Ok(_)) => {}
            (_, Err(BlobFsError::NoSpace | BlobFsError::NotFound | BlobFsError::Exists)) => return Ok(()),
            (op, Err(error)) => return Err(format!("{op:?}: {error}")),
        }
        self.model.apply(&op);
        Ok(())
    }

    /// Reads all files.
    fn contents(&mut self) -> Result<BTreeMap<String, Vec<u8>>, String> {
        let mut found = BTreeMap::new();
        let mut directories = vec![String::new()];
        while let Some(directory) = directories.pop() {
            for item in self.fs.list(directory.as_bytes()).map_err(|error| error.to_string())? {
                let path = format!("{directory}{}", String::from_utf8_lossy(&item.name));
                if item.status.is_directory {
                    directories.push(format!("{path}/"));
                    continue;
                }
                let open = BlobFsRequest::Open { path: path.as_bytes().to_vec(), how: OpenHow::READ };
                let BlobFsReply::Opened(open) = self.request(open)? else { return Err("no opener".into()) };
                let read = BlobFsRequest::Read { open, offset: 0, length: 1 << 24 };
                let BlobFsReply::Data(data) = self.request(read)? else { return Err("no data".into()) };
                self.request(BlobFsRequest::Close { open })?;
                found.insert(path, data);
            }
        }
        Ok(found)
    }

    fn load(&mut self) -> Result<(), String> {
        let store = self.disk.load().map_err(|error| error.to_string())?;
        self.fs = BlobFs::open(store, self.disk.device, options()).map_err(|error| error.to_string())?;
        Ok(())
    }

    fn crash(&mut self) -> Result<(), String> {
        self.check_nameless()?;
        let mut in_flight: Vec<Op> = std::mem::take(&mut self.requests).into_values().collect();
        in_flight.retain(|op| !matches!(op, Op::Create { .. } | Op::Read { .. } | Op::Close { .. }));
        // What is written only may be there in parts: that is in the model already.
        in_flight.retain(|op| !matches!(op, Op::Append { .. } | Op::Write { .. }));
        self.open.clear();
        self.nameless.clear();
        self.disk = self.disk.crash(&mut self.random);
        self.load()?;
        // Power fails again while what was left is removed.
        while self.random.happens(300) {
            self.begin_io();
            for _ in 0..self.random.below(20) {
                let in_flight = self.disk.in_flight();
                let Some(id) = in_flight.get(self.random.index(in_flight.len())).copied() else { break };
                self.complete(id)?;
            }
            self.disk = self.disk.crash(&mut self.random);
            self.load()?;
        }
        self.drain()?;
        let found = self.contents()?;
        let mut problems = Vec::new();
        let is_right = (0..1u32 << in_flight.len()).any(|there| {
            let mut model = self.model.clone();
            let happened = in_flight.iter().enumerate().filter(|(bit, _)| there >> bit & 1 == 1);
            happened.for_each(|(_, op)| model.apply(op));
            let result = model.check(&found);
            problems.extend(result.as_ref().err().cloned());
            result.is_ok()
        });
        if !is_right {
            return Err(format!("none is right of {problems:?}, with {in_flight:?}"));
        }
        let damage: Vec<_> = self.fs.findings().iter().filter(|finding| finding.is_damage()).collect();
        if !damage.is_empty() {
            return Err(format!("{damage:?}"));
        }
        self.model.files = found
            .into_iter()
            .map(|(name, content)| {
                let durable = Some(content.clone());
                (name, ModelFile { current: content, durable, ..ModelFile::default() })
            })
            .collect();
        Ok(())
    }

    /// Files without a name are readable while they are open.
    fn check_nameless(&mut self) -> Result<(), String> {
        // With requests in flight, ending them all would be no power failure amid them.
        if !self.requests.is_empty() || !self.disk.in_flight().is_empty() {
            return Ok(());
        }
        for (open, content) in self.nameless.clone() {
            match self.request(BlobFsRequest::Read { open, offset: 0, length: 1 << 24 })? {
                BlobFsReply::Data(data) if data == content => {}
                _ => return Err("a file without a name has changed".to_string()),
            }
        }
        Ok(())
    }

    /// Closes the store: then all is there, and nothing is left to be removed.
    fn close(&mut self) -> Result<(), String> {
        for _ in 0..100 {
            self.step()?;
        }
        self.drain()?;
        self.request(BlobFsRequest::Unload)?;
        self.load()?;
        self.drain()?;
        let findings = self.fs.blobs().findings();
        if !self.fs.findings().is_empty() || !findings.is_empty() {
            return Err(format!("{:?} {findings:?}", self.fs.findings()));
        }
        let found = self.contents()?;
        let expected = self.model.files.iter().map(|(name, file)| (name.clone(), file.current.clone()));
        match found == expected.collect() {
            true => Ok(()),
            false => Err("what was closed is not what was loaded".to_string()),
        }
    }
}
