use proptest::prelude::*;
use wire_blob::BlobId;

use super::*;
use crate::cluster_map::BlobClusterMap;
use crate::read::BlobSegment;
use crate::write::{BlobStoreDevice, BlobStoreFormat, OpenBlobStore};

/// Blobs from the oldest snapshot to a volume, each the parent of the next, of these lengths and with these
/// clusters by index.
fn chain(blobs: &[(u32, Vec<u32>)], is_external: bool) -> (BlobStore, BlobId) {
    let device = BlobStoreDevice {
        bytes: 64 << 20,
        block_bytes: 512,
        has_volatile_cache: false,
        atomic_write_bytes: 4096,
    };
    let (open, _) = OpenBlobStore::format(&BlobStoreFormat::default(), device).unwrap();
    let mut store = BlobStore::clone(open.published());
    let mut parent = if is_external { BlobParent::External(b"x".to_vec()) } else { BlobParent::None };
    let mut id = BlobId::from_page(0);
    for (page, (length, clusters)) in (0..).zip(blobs) {
        id = BlobId::from_page(page);
        let mut blob = Blob::new(id);
        blob.clusters = BlobClusterMap::new(*length);
        for index in clusters.iter().filter(|index| *index < length) {
            blob.clusters.set(*index, Some(1 + page * 2000 + index));
        }
        blob.flags.data_read_only = u64::from(page as usize + 1 < blobs.len());
        blob.parent = std::mem::replace(&mut parent, BlobParent::Snapshot(id));
        store.blobs.set(Arc::new(blob));
    }
    (store, id)
}

#[test]
fn a_chunk_that_one_snapshot_has_takes_no_memory() {
    let (store, volume) = chain(&[(1024, (0..1024).collect()), (1024, vec![3]), (1024, vec![])], false);
    let mut chain = SnapshotChain::of(&store, store.blob(volume).unwrap()).unwrap();
    assert_eq!(chain.cluster(3), ChainCluster::Cluster(2004));
    assert_eq!((chain.cluster(4), chain.merged), (ChainCluster::Cluster(5), 1));
    assert_eq!((chain.cluster(700), chain.merged), (ChainCluster::Cluster(701), 1));
}

#[test]
fn a_chain_is_that_of_one_state() {
    let (mut store, volume) = chain(&[(8, vec![1]), (8, vec![2]), (8, vec![])], false);
    let blob = store.blobs.shared(volume).unwrap().clone();
    let chain = SnapshotChain::of(&store, &blob).unwrap();
    let before = store.blobs.chains();
    let mut written = Blob::clone(&blob);
    written.clusters.set(5, Some(9999));
    store.blobs.set(Arc::new(written));
    assert!(chain.is_current(&store, store.blob(volume).unwrap()));
    assert_eq!(store.blobs.chains(), before, "a write changes no chain");
    let mut decoupled = Blob::clone(&blob);
    decoupled.parent = BlobParent::Snapshot(BlobId::from_page(0));
    store.blobs.set(Arc::new(decoupled));
    assert!(!chain.is_current(&store, store.blob(volume).unwrap()) && store.blobs.chains() > before);
    store.blobs.remove(BlobId::from_page(0));
    assert!(SnapshotChain::of(&store, store.blob(volume).unwrap()).is_none());
}

#[test]
fn a_parent_that_can_be_written_is_no_snapshot() {
    let (mut store, volume) = chain(&[(8, vec![1]), (8, vec![])], false);
    assert!(SnapshotChain::of(&store, store.blob(volume).unwrap()).is_some());
    let before = store.blobs.chains();
    let mut parent = store.blob(BlobId::from_page(0)).unwrap().clone();
    parent.flags.data_read_only = 0;
    store.blobs.set(Arc::new(parent));
    assert!(SnapshotChain::of(&store, store.blob(volume).unwrap()).is_none());
    assert!(store.blobs.chains() > before);
}

proptest! {
    #[test]
    fn a_chain_has_what_a_walk_finds(
        blobs in proptest::collection::vec((1..1500u32, proptest::collection::vec(0..1500u32, 0..40)), 2..7),
        is_external: bool,
    ) {
        let (store, volume) = chain(&blobs, is_external);
        let blob = store.blob(volume).unwrap();
        let mut chain = SnapshotChain::of(&store, blob).unwrap();
        let bytes = u64::from(store.layout().cluster_bytes);
        for index in (0..blob.clusters().length()).filter(|index| blob.clusters().get(*index).is_none()) {
            let expected = match store.read(volume, u64::from(index) * bytes, bytes).unwrap().next() {
                Some(Ok(BlobSegment::Device { offset, .. })) => ChainCluster::Cluster((offset / bytes) as u32),
                Some(Ok(BlobSegment::Zeroes { .. })) if !is_external => ChainCluster::Zeroes,
                _ => ChainCluster::Unknown,
            };
            prop_assert_eq!(chain.cluster(index), expected, "cluster {}", index);
        }
    }
}
