//! Stores of any metadata, with right CRCs.

use proptest::collection::vec;
use proptest::prelude::*;
use wire_blob::{BlobClusterRun, BlobFlags, ExtentPage, MetadataDescriptor};

use crate::support::made::*;

/// Small numbers, so that pages, clusters and blobs often name each other.
fn descriptor() -> impl Strategy<Value = MetadataDescriptor> {
    let number = || prop_oneof![Just(0u32), 0..30u32, 0..70u32, any::<u32>()];
    let run = (number(), 1..5u32).prop_map(|(cluster, length)| BlobClusterRun {
        cluster,
        length: length.min(u32::MAX - cluster).max(1),
    });
    let run = run.prop_filter("runs end", |run| run.cluster.checked_add(run.length).is_some());
    let name = prop_oneof![Just("SNAP"), Just("SNAPTMP"), Just("SNAPRM"), Just("EXTSNAP")];
    prop_oneof![
        (0..16u64, 0..2u64).prop_map(|(invalid, data_read_only)| MetadataDescriptor::Flags(BlobFlags {
            invalid,
            data_read_only,
            metadata_read_only: 0
        })),
        vec(run, 1..4).prop_map(MetadataDescriptor::ExtentRuns),
        (prop_oneof![0..600u64, any::<u64>()], vec(number(), 0..3))
            .prop_map(|(clusters, pages)| table(clusters, &pages)),
        (prop_oneof![Just(0u32), Just(512), any::<u32>()], vec(number(), 0..6))
            .prop_map(|(first, clusters)| MetadataDescriptor::ExtentPage(ExtentPage { first, clusters })),
        (name, 0..24u64).prop_map(|(name, page)| internal(name.as_bytes(), (1 << 32) + page)),
    ]
}

type AnyPage = (u32, u32, u32, Option<u32>, Vec<MetadataDescriptor>);

fn any_page() -> impl Strategy<Value = AnyPage> {
    let next = proptest::option::of(0..30u32);
    (0..PAGES, 0..PAGES, 0..2u32, next, vec(descriptor(), 0..5))
}

/// A store that is to be made.
#[derive(Clone, Debug)]
pub(crate) struct AnyStore {
    pages: Vec<AnyPage>,
    clean: bool,
    /// Pages that the mask of blob ids names besides.
    marked: Vec<u32>,
}

pub(crate) fn store() -> impl Strategy<Value = AnyStore> {
    let parts = (vec(any_page(), 0..12), any::<bool>(), vec(0..PAGES, 0..8));
    parts.prop_map(|(pages, clean, marked)| AnyStore { pages, clean, marked })
}

impl AnyStore {
    pub(crate) fn make(self) -> MadeStore {
        let mut store = MadeStore::new();
        for (index, (page, other, sequence, next, descriptors)) in self.pages.into_iter().enumerate() {
            let blob = if index % 3 == 0 { other } else { page };
            store = store.page(page, blob, sequence, next, descriptors);
        }
        for page in self.marked {
            store.blob_ids.set(page);
        }
        store.super_block.clean = self.clean;
        store.sealed()
    }
}
