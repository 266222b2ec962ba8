use std::path::PathBuf;

use cluster_map::{LocalMap, PoolRecord};

use super::*;

/// A map in a directory that is removed afterwards.
struct MapDirectory(PathBuf);

impl MapDirectory {
    fn new(name: &str) -> (MapDirectory, LocalMap, u64) {
        let path = std::env::temp_dir().join(format!("ringbolt-attach-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        let map = LocalMap::open(&path).unwrap();
        let pool =
            PoolRecord { first_group: 0, groups: 4, replicas: 1, in_sync_min: 1, class: Default::default() };
        map.create_pool("p", &pool).unwrap();
        let volume = map.create_image("p", "vol", 1 << 20).unwrap().volume;
        (MapDirectory(path), map, volume)
    }
}

impl Drop for MapDirectory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

const EXCLUSIVE: AttachOptions =
    AttachOptions { shared: false, force: false, read_only: false, same_run: false };
const SHARED: AttachOptions = AttachOptions { shared: true, ..EXCLUSIVE };
const FORCED: AttachOptions = AttachOptions { force: true, ..EXCLUSIVE };

/// One of another machine, whose processes this one does not see.
fn elsewhere(shared: bool) -> ImageHolder {
    ImageHolder {
        id: Uuid::new_v4(),
        lease: Uuid::new_v4(),
        name: "host7".to_string(),
        address: "10.0.0.7".to_string(),
        since: seconds_since_1970(),
        shared,
        machine: "another".to_string(),
        process: 4242,
        started: 1,
    }
}

/// One that is this process.
fn here(shared: bool) -> ImageHolder {
    let process = std::process::id();
    let started = process_start(process).expect("this process has begun");
    ImageHolder { name: "here".to_string(), machine: machine(), process, started, ..elsewhere(shared) }
}

#[test]
fn a_second_holder_is_refused_with_the_name_of_the_first() {
    let (_directory, map, volume) = MapDirectory::new("second");
    let (first, second) = (here(false), elsewhere(false));
    let first_epoch = attach(&map, ("p", "vol"), volume, &first, EXCLUSIVE).unwrap();
    for options in [EXCLUSIVE, SHARED] {
        let holder = ImageHolder { shared: options.shared, ..second.clone() };
        let refused = attach(&map, ("p", "vol"), volume, &holder, options).unwrap_err().to_string();
        assert!(refused.contains("image p/vol is in use by here (process "), "{refused}");
        assert!(refused.contains("10.0.0.7") && refused.contains("--force"), "{refused}");
    }
    // By force, what the first one has in flight is refused from then on.
    let second_epoch = attach(&map, ("p", "vol"), volume, &second, FORCED).unwrap();
    assert!(second_epoch > first_epoch);
    assert_eq!(map.image_lock("p", volume).unwrap().unwrap().holders, std::slice::from_ref(&second));
    // The first one detaches nothing but itself.
    detach(&map, "p", volume, first.id).unwrap();
    assert_eq!(map.image_lock("p", volume).unwrap().unwrap().holders.len(), 1);
    detach(&map, "p", volume, second.id).unwrap();
    assert!(attach(&map, ("p", "vol"), volume, &first, EXCLUSIVE).unwrap() > second_epoch);
}

#[test]
fn those_that_share_an_image_have_one_attach_epoch() {
    let (_directory, map, volume) = MapDirectory::new("shared");
    let (first, second) = (here(true), ImageHolder { id: Uuid::new_v4(), ..here(true) });
    let epoch = attach(&map, ("p", "vol"), volume, &first, SHARED).unwrap();
    assert_eq!(attach(&map, ("p", "vol"), volume, &second, SHARED).unwrap(), epoch);
    assert!(attach(&map, ("p", "vol"), volume, &elsewhere(false), EXCLUSIVE).is_err());
    detach(&map, "p", volume, first.id).unwrap();
    assert!(attach(&map, ("p", "vol"), volume, &elsewhere(false), EXCLUSIVE).is_err());
    detach(&map, "p", volume, second.id).unwrap();
    assert!(attach(&map, ("p", "vol"), volume, &elsewhere(false), EXCLUSIVE).unwrap() > epoch);
}

#[test]
fn a_holder_that_is_gone_is_taken_over() {
    let (_directory, map, volume) = MapDirectory::new("gone");
    // A process of this machine that has ended, or another one that has its number.
    let mut child = std::process::Command::new("true").spawn().unwrap();
    let ended = ImageHolder { process: child.id(), ..here(false) };
    child.wait().unwrap();
    let reused = ImageHolder { started: 1, ..here(false) };
    // One of another machine whose lease has ended.
    let mut last = 0;
    for holder in [ended, reused, elsewhere(false), here(false)] {
        let epoch = attach(&map, ("p", "vol"), volume, &holder, EXCLUSIVE).unwrap();
        assert!(epoch > last);
        last = epoch;
    }
}

#[test]
fn a_holder_of_another_machine_that_renews_its_lease_is_no_suspect_for_long() {
    let (directory, map, volume) = MapDirectory::new("lease");
    let holder = elsewhere(false);
    map.renew_holder(holder.lease, 60).unwrap();
    attach(&map, ("p", "vol"), volume, &holder, EXCLUSIVE).unwrap();
    let lease = std::fs::File::options()
        .write(true)
        .open(directory.0.join("image-holders").join(holder.lease.to_string()));
    // It renewed it long ago, and does so again while it is watched.
    lease.unwrap().set_modified(SystemTime::now() - Duration::from_secs(30)).unwrap();
    std::thread::scope(|scope| {
        let refused = scope.spawn(|| attach(&map, ("p", "vol"), volume, &here(false), EXCLUSIVE));
        while !refused.is_finished() {
            std::thread::sleep(ASK_AGAIN);
            map.renew_holder(holder.lease, 60).unwrap();
        }
        assert!(matches!(refused.join().unwrap(), Err(ClientError::InUse { .. })));
    });
}

#[test]
fn an_attachment_ends_once_and_groups_are_known_one_by_one() {
    let state = AttachState::new(3, 8..12);
    let known = |epoch| (7..13).filter(|group| state.is_known_in(*group, epoch)).collect::<Vec<_>>();
    assert_eq!(known(3), Vec::<u32>::new());
    state.set_known_in(9, 3);
    assert_eq!(known(3), [9]);
    // Once requests are aborted, groups have to hear of the epoch that fences them.
    state.abort(4);
    state.set_known_in(8, 3);
    assert_eq!((state.epoch(), state.aborts(), known(4)), (4, 1, Vec::new()));
    state.set_known_in(8, 4);
    assert_eq!((known(4), known(3)), (vec![8], vec![8, 9]));
    assert_eq!(state.status(), AttachStatus::Live);
    assert!(state.end(AttachStatus::Fenced) && !state.end(AttachStatus::Closed));
    assert_eq!(state.status(), AttachStatus::Fenced);
}

#[test]
fn a_holder_that_an_older_map_has_forgotten_is_put_back() {
    let (_directory, map, volume) = MapDirectory::new("forgotten");
    let holders = || map.image_lock("p", volume).unwrap().unwrap().holders;
    let forget = |attach_epoch| {
        let known = map.image_lock("p", volume).unwrap();
        let older = ImageLock { attach_epoch, holders: Vec::new() };
        assert!(map.change_image_lock("p", volume, known.as_ref(), &older).unwrap());
    };
    let (first, second) = (here(false), here(false));
    let epoch = attach(&map, ("p", "vol"), volume, &first, EXCLUSIVE).unwrap();
    forget(epoch - 1);
    assert!(put_back(&map, "p", volume, &first, epoch).unwrap());
    assert!(put_back(&map, "p", volume, &first, epoch).unwrap());
    assert_eq!(holders(), std::slice::from_ref(&first));
    assert!(attach(&map, ("p", "vol"), volume, &second, EXCLUSIVE).is_err());
    // Where another one came first, its attach epoch is not one that the first has had.
    forget(1);
    let other = attach(&map, ("p", "vol"), volume, &second, EXCLUSIVE).unwrap();
    assert!(other >= epoch, "{other} and {epoch}");
    for epoch in [other - 1, other] {
        assert!(!put_back(&map, "p", volume, &first, epoch).unwrap());
    }
    assert_eq!(holders(), [second]);
}

#[test]
fn aborted_requests_are_fenced_and_the_image_stays_attached() {
    let (_directory, map, volume) = MapDirectory::new("aborted");
    let map: Arc<dyn ClusterMap> = Arc::new(map);
    let process = Arc::new(HolderProcess {
        lease: Uuid::new_v4(),
        map: map.clone(),
        watched: Mutex::default(),
        held: Mutex::default(),
        followers: Mutex::default(),
        revision: AtomicU64::new(0),
    });
    let attached = |holder: ImageHolder, options| {
        let epoch = attach(map.as_ref(), ("p", "vol"), volume, &holder, options).unwrap();
        let (state, process) = (Arc::new(AttachState::new(epoch, 0..4)), process.clone());
        let (is_detached, volume) = (Mutex::new(false), Arc::new(AtomicU64::new(volume)));
        let lock = HeldLock { pool: "p".into(), volume, holder, state: state.clone(), process, is_detached };
        (Attachment { state, lock: Some(Arc::new(lock)) }, epoch)
    };
    let epoch_in_map = || map.image_lock("p", volume).unwrap().unwrap().attach_epoch;
    let (first, epoch) = attached(here(false), EXCLUSIVE);
    let watch = Arc::new(ImageWatch {
        pool: "p".into(),
        image: "vol".into(),
        uuid: map.images().unwrap().into_values().next().unwrap().uuid,
        volume: Arc::new(AtomicU64::new(volume)),
        state: first.state.clone(),
        missing_since: Mutex::default(),
        resized: Box::new(|_| {}),
    });
    first.watch(&watch);
    first.abort_in_flight().unwrap();
    assert_eq!((first.state.epoch(), epoch_in_map(), first.state.aborts()), (epoch + 1, epoch + 1, 1));
    process.refresh().unwrap();
    assert_eq!(first.state.status(), AttachStatus::Live, "it fences itself");
    // One that was taken over fails its requests, and does not take the image back.
    let (shared, taken) = attached(here(true), AttachOptions { shared: true, ..FORCED });
    first.abort_in_flight().unwrap();
    assert_eq!((first.state.epoch(), epoch_in_map(), first.state.aborts()), (epoch + 1, taken, 2));
    // Those that share it are not fenced by one of them.
    let (other, joined) = attached(here(true), SHARED);
    assert_eq!(joined, taken);
    shared.abort_in_flight().unwrap();
    assert_eq!((shared.state.epoch(), epoch_in_map(), shared.state.aborts()), (taken, taken, 1));
    other.detach();
    shared.detach();
}
