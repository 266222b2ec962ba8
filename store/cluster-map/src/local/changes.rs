//! Changes of a map in a directory. inotify(7) reports a change at once. A lease that ends changes nothing, so that everything is
//! also read at an interval.

use std::collections::{BTreeSet, HashMap};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::inotify::{self, CreateFlags, ReadFlags, WatchFlags};
use rustix::io::Errno;

use super::{LocalMap, group_directory};
use crate::{ClusterMap, GroupId, MapChange, MapChanges, MapError};

/// How often everything is read.
const READ_EVERY: Duration = Duration::from_millis(500);
/// The directories of records that change, but for those of groups.
const WATCHED: [&str; 7] = ["nodes", "devices", "pools", "images", "keys", "up", "out"];

/// Waits for changes of the map in a directory.
pub(super) struct LocalChanges {
    map: LocalMap,
    /// Without, changes are found when everything is read.
    directories: Option<WatchedDirectories>,
    /// When everything is read again.
    read_at: Instant,
}

/// Directories in which inotify reports records that are new, replaced or removed.
struct WatchedDirectories {
    inotify: OwnedFd,
    /// The directory whose directories are groups.
    groups: i32,
    /// By watch: the group whose records are in the directory.
    of_group: HashMap<i32, GroupId>,
}

/// What inotify reported.
#[derive(Default)]
struct Reported {
    /// Another record than that of a group has changed, or it is not known which.
    is_other: bool,
    groups: BTreeSet<GroupId>,
}

impl LocalChanges {
    pub(super) fn new(root: PathBuf) -> LocalChanges {
        LocalChanges { map: LocalMap { root }, directories: None, read_at: Instant::now() }
    }

    fn read_everything(&mut self) -> Vec<MapChange> {
        self.read_at = Instant::now() + READ_EVERY;
        vec![MapChange::Everything]
    }
}

impl MapChanges for LocalChanges {
    fn wait(&mut self, limit: Duration) -> Result<Vec<MapChange>, MapError> {
        if self.directories.is_none() {
            // Before everything is read, so that nothing changes unseen. The kernel may have no instance left.
            self.directories = WatchedDirectories::new(&self.map).ok();
        }
        let left = self.read_at.saturating_duration_since(Instant::now());
        let Some(directories) = self.directories.as_mut().filter(|_| !left.is_zero()) else {
            std::thread::sleep(left.min(limit));
            return Ok(if left <= limit { self.read_everything() } else { Vec::new() });
        };
        let reported = directories.wait(&self.map, left.min(limit))?;
        if reported.is_other || Instant::now() >= self.read_at {
            return Ok(self.read_everything());
        }
        let records = reported.groups.into_iter().map(|id| Ok((id, self.map.group(id)?)));
        let records = records.collect::<Result<Vec<_>, MapError>>().inspect_err(|_| {
            // What was reported is not reported again.
            self.read_at = Instant::now();
        })?;
        let changed = |(id, record)| Some(MapChange::Group(id, record?));
        Ok(records.into_iter().filter_map(changed).collect())
    }

    fn retry_after(&self) -> Duration {
        READ_EVERY
    }
}

impl WatchedDirectories {
    fn new(map: &LocalMap) -> rustix::io::Result<WatchedDirectories> {
        let inotify = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)?;
        // A record gets its name by link(2) or rename(2), when it is whole.
        let published = WatchFlags::CREATE | WatchFlags::MOVED_TO;
        for directory in WATCHED {
            inotify::add_watch(&inotify, map.root.join(directory), published | WatchFlags::DELETE)?;
        }
        let groups = inotify::add_watch(&inotify, map.root.join("groups"), WatchFlags::CREATE)?;
        let mut directories = WatchedDirectories { inotify, groups, of_group: HashMap::new() };
        let existing = map.names("groups".as_ref()).unwrap_or_default();
        existing.iter().filter_map(|name| name.parse().ok()).for_each(|id| directories.add(map, GroupId(id)));
        Ok(directories)
    }

    /// Watches the directory of a group. One for which the kernel has no watch left is read at the interval.
    fn add(&mut self, map: &LocalMap, id: GroupId) {
        let path = map.root.join(group_directory(id));
        if let Ok(watch) = inotify::add_watch(&self.inotify, path, WatchFlags::CREATE) {
            self.of_group.insert(watch, id);
        }
    }

    /// What has changed, if anything has within this time.
    fn wait(&mut self, map: &LocalMap, limit: Duration) -> Result<Reported, MapError> {
        let failed = |error: Errno| MapError::Storage {
            what: format!("changes of {}", map.root.display()),
            reason: error.to_string(),
        };
        let limit = Timespec::try_from(limit).expect("an interval is a short time");
        match poll(&mut [PollFd::new(&self.inotify, PollFlags::IN)], Some(&limit)) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(failed(error)),
        }
        let (mut reported, mut new) = (Reported::default(), Vec::new());
        let mut buffer = [MaybeUninit::uninit(); 4096];
        let mut events = inotify::Reader::new(&self.inotify, &mut buffer);
        loop {
            let event = match events.next() {
                Ok(event) => event,
                Err(Errno::WOULDBLOCK) => break,
                Err(Errno::INTR) => continue,
                Err(error) => return Err(failed(error)),
            };
            if event.events().contains(ReadFlags::IGNORED) {
                // The directory of a group that is removed: so is its pool, which is reported too.
                self.of_group.remove(&event.wd());
            } else if let Some(id) = self.of_group.get(&event.wd()) {
                reported.groups.insert(*id);
            } else if event.wd() == self.groups {
                let name = event.file_name().and_then(|name| name.to_str().ok());
                new.extend(name.and_then(|name| name.parse().ok()).map(GroupId));
            } else {
                reported.is_other = true;
            }
        }
        for id in new {
            self.add(map, id);
            // Its first record may have been there before the watch.
            reported.groups.insert(id);
        }
        Ok(reported)
    }
}
