//! What a store must have, by the names of its blobs.

use std::collections::{BTreeMap, BTreeSet};

use super::disk::{Disk, SECTOR, external_tag, tag_of};
use super::{CLUSTER, UNIT, UNITS};
use crate::blob::{Blob, BlobParent};
use crate::{BlobStore, StoreSeverity};

/// What a part of a cluster may have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Content {
    /// Anything: a thick blob that was never written.
    Any,
    /// One of these, sector by sector. Those before the last may be there until a flush.
    Tags(Vec<u64>),
    /// One of these in each sector, for good: a power failure cut a write in two.
    Mixed(Vec<u64>),
}

impl Content {
    fn has(&self, tag: u64) -> bool {
        match self {
            Content::Any => true,
            Content::Tags(tags) | Content::Mixed(tags) => tags.contains(&tag),
        }
    }

    pub(super) fn flushed(&mut self) {
        if let Content::Tags(tags) = self
            && let Some(last) = tags.last().copied()
        {
            *tags = vec![last];
        }
    }

    /// Adds what a write left. Until a flush, what was there before may be again.
    pub(super) fn write(&mut self, tag: u64, is_durable: bool) {
        match self {
            _ if is_durable => *self = Content::Tags(vec![tag]),
            Content::Any => {}
            Content::Tags(tags) => tags.push(tag),
            Content::Mixed(tags) => {
                tags.push(tag);
                *self = Content::Tags(std::mem::take(tags));
            }
        }
    }

    fn or(&mut self, other: &Content) {
        match (&mut *self, other) {
            (Content::Any, _) => {}
            (_, Content::Any) => *self = Content::Any,
            (Content::Tags(tags), Content::Tags(others)) if tags.len() > 1 => {
                others.iter().rev().for_each(|tag| tags.insert(0, *tag));
            }
            _ => {}
        }
    }
}

pub(super) type Cluster = Vec<Content>;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Parent {
    None,
    Blob(String),
    External,
}

#[derive(Clone, Debug)]
pub(super) struct ModelBlob {
    pub(super) clusters: u32,
    pub(super) thin: bool,
    pub(super) read_only: bool,
    pub(super) value: Vec<u8>,
    pub(super) parent: Parent,
    pub(super) own: BTreeMap<u32, Cluster>,
}

impl ModelBlob {
    pub(super) fn new(clusters: u32, thin: bool, parent: Parent) -> ModelBlob {
        let unwritten = || vec![Content::Any; UNITS];
        let own =
            if thin { BTreeMap::new() } else { (0..clusters).map(|index| (index, unwritten())).collect() };
        ModelBlob { clusters, thin, read_only: false, value: Vec::new(), parent, own }
    }
}

#[derive(Clone, Debug, Default)]
pub(super) struct Model {
    pub(super) blobs: BTreeMap<String, ModelBlob>,
}

/// A change, by names.
#[derive(Clone, Debug)]
pub(super) enum Change {
    Create { name: String, thin: bool, clusters: u32 },
    Delete { name: String },
    Resize { name: String, clusters: u32 },
    Set { name: String, value: Vec<u8> },
    ReadOnly { name: String },
    Snapshot { name: String, snapshot: String },
    Clone { of: String, name: String },
    CloneExternal { name: String, clusters: u32 },
    Inflate { name: String },
    Decouple { name: String },
    SetParent { name: String, parent: String },
    SetParentExternal { name: String },
    Release { name: String, index: u32 },
    Grow,
}

impl Change {
    /// The blobs that it is about.
    pub(super) fn names(&self) -> Vec<&String> {
        use Change::*;
        match self {
            Create { name, .. }
            | Delete { name }
            | Resize { name, .. }
            | Set { name, .. }
            | ReadOnly { name }
            | CloneExternal { name, .. }
            | Inflate { name }
            | Decouple { name }
            | SetParentExternal { name }
            | Release { name, .. } => vec![name],
            Snapshot { name, snapshot } => vec![name, snapshot],
            Clone { of, name } => vec![of, name],
            SetParent { name, parent } => vec![name, parent],
            Grow => Vec::new(),
        }
    }
}

impl Model {
    pub(super) fn clones(&self, name: &str) -> Vec<String> {
        let is_clone = |blob: &ModelBlob| blob.parent == Parent::Blob(name.to_string());
        self.blobs.iter().filter(|(_, blob)| is_clone(blob)).map(|(name, _)| name.clone()).collect()
    }

    /// What a cluster has that the blob may not have itself.
    pub(super) fn cluster(&self, name: &str, index: u32) -> Cluster {
        let mut blob = &self.blobs[name];
        // What would be a circle is tried too, as a change that may have been made.
        for _ in 0..100 {
            if index >= blob.clusters {
                return vec![Content::Tags(vec![0]); UNITS];
            }
            if let Some(own) = blob.own.get(&index) {
                return own.clone();
            }
            match &blob.parent {
                Parent::None => return vec![Content::Tags(vec![0]); UNITS],
                Parent::External => {
                    let at = |unit: usize| u64::from(index) * CLUSTER as u64 + (unit * UNIT) as u64;
                    return (0..UNITS).map(|unit| Content::Tags(vec![external_tag(at(unit))])).collect();
                }
                // A state in which it is not there is not the right one.
                Parent::Blob(parent) => match self.blobs.get(parent) {
                    Some(parent) => blob = parent,
                    None => break,
                },
            }
        }
        vec![Content::Any; UNITS]
    }

    pub(super) fn flushed(&mut self) {
        let all = self.blobs.values_mut().flat_map(|blob| blob.own.values_mut());
        all.flatten().for_each(Content::flushed);
    }

    /// Applies a change, if its blobs are there: all that may have been made are tried.
    pub(super) fn apply(&mut self, change: &Change) {
        let is_there = |name: &&String| self.blobs.contains_key(*name);
        let is_possible = match change {
            Change::Create { .. } | Change::CloneExternal { .. } | Change::Grow => true,
            Change::Clone { of, .. } => is_there(&of),
            Change::Snapshot { name, .. } => is_there(&name),
            other => other.names().iter().all(is_there),
        };
        if !is_possible {
            return;
        }
        let mut blobs = std::mem::take(&mut self.blobs);
        match change.clone() {
            Change::Create { name, thin, clusters } => {
                blobs.insert(name, ModelBlob::new(clusters, thin, Parent::None));
            }
            Change::Delete { name } => {
                self.blobs = blobs;
                let clones = self.clones(&name);
                blobs = std::mem::take(&mut self.blobs);
                let Some(old) = blobs.remove(&name) else { return self.blobs = blobs };
                if let [clone] = &clones[..] {
                    let clone = blobs.get_mut(clone).unwrap();
                    clone.parent = old.parent;
                    for (index, cluster) in old.own {
                        if index < clone.clusters {
                            clone.own.entry(index).or_insert(cluster);
                        }
                    }
                }
            }
            Change::Resize { name, clusters } => {
                let blob = blobs.get_mut(&name).unwrap();
                let new = clusters.max(blob.clusters);
                for index in blob.clusters..new {
                    if !blob.thin {
                        blob.own.insert(index, vec![Content::Any; UNITS]);
                    }
                }
                blob.clusters = clusters;
                blob.own.retain(|index, _| *index < clusters);
            }
            Change::Set { name, value } => blobs.get_mut(&name).unwrap().value = value,
            Change::ReadOnly { name } => blobs.get_mut(&name).unwrap().read_only = true,
            Change::Snapshot { name, snapshot } => {
                let blob = blobs.get_mut(&name).unwrap();
                let mut new = blob.clone();
                new.read_only = true;
                // The attribute of the original is not the snapshot's.
                new.value = Vec::new();
                (blob.own, blob.thin) = (BTreeMap::new(), true);
                blob.parent = Parent::Blob(snapshot.clone());
                blobs.insert(snapshot, new);
            }
            Change::Clone { of, name } => {
                let clusters = blobs[&of].clusters;
                blobs.insert(name, ModelBlob::new(clusters, true, Parent::Blob(of)));
            }
            Change::CloneExternal { name, clusters } => {
                blobs.insert(name, ModelBlob::new(clusters, true, Parent::External));
            }
            Change::Inflate { name } | Change::Decouple { name } => {
                self.blobs = blobs;
                let blob = self.blobs[&name].clone();
                let is_inflate = matches!(change, Change::Inflate { .. });
                let (needed, parent) = match &blob.parent {
                    Parent::Blob(parent) if !is_inflate => {
                        let Some(parent) = self.blobs.get(parent) else { return };
                        (parent.own.keys().copied().collect::<Vec<u32>>(), parent.parent.clone())
                    }
                    Parent::None if !blob.thin => (Vec::new(), Parent::None),
                    _ => ((0..blob.clusters).collect(), Parent::None),
                };
                for index in needed.into_iter().filter(|index| *index < blob.clusters) {
                    let cluster = self.cluster(&name, index);
                    self.blobs.get_mut(&name).unwrap().own.insert(index, cluster);
                }
                let blob = self.blobs.get_mut(&name).unwrap();
                blob.parent = parent;
                blob.thin &= !is_inflate;
                return;
            }
            Change::SetParent { name, parent } => {
                self.blobs = blobs;
                return self.set_parent(&name, Parent::Blob(parent));
            }
            Change::SetParentExternal { name } => {
                self.blobs = blobs;
                return self.set_parent(&name, Parent::External);
            }
            Change::Release { name, index } => {
                blobs.get_mut(&name).unwrap().own.remove(&index);
            }
            Change::Grow => {}
        }
        self.blobs = blobs;
    }

    fn set_parent(&mut self, name: &str, parent: Parent) {
        let own = std::mem::take(&mut self.blobs.get_mut(name).unwrap().own);
        self.blobs.get_mut(name).unwrap().parent = parent;
        let mut changed = BTreeMap::new();
        for (index, mut cluster) in own {
            // A first write that no flush followed may be lost, so that the new parent shows.
            let below = self.cluster(name, index);
            cluster.iter_mut().zip(&below).for_each(|(content, below)| content.or(below));
            changed.insert(index, cluster);
        }
        self.blobs.get_mut(name).unwrap().own = changed;
    }

    /// Compares a loaded store with the model; what is different, if anything is. `writing` are tags of
    /// writes in flight.
    pub(super) fn compare(
        &self,
        disk: &Disk,
        store: &BlobStore,
        writing: &[(String, u32, usize, u64)],
    ) -> Result<(), String> {
        let named = named(store)?;
        let (found, expected): (BTreeSet<_>, BTreeSet<_>) =
            (named.keys().collect(), self.blobs.keys().collect());
        if found != expected {
            return Err(format!("blobs {found:?}, expected {expected:?}"));
        }
        for (name, blob) in &named {
            let model = &self.blobs[name];
            let parent = parent_of(store, blob)?;
            let value = blob.xattr(b"value").unwrap_or_default();
            let found = (blob.clusters().length(), blob.is_thin(), blob.is_read_only(), &parent, value);
            let expected = (model.clusters, model.thin, model.read_only, &model.parent, &model.value[..]);
            if found != expected {
                return Err(format!("{name} is {found:?}, expected {expected:?}"));
            }
            self.compare_content(disk, store, name, blob, writing)?;
        }
        Ok(())
    }

    fn compare_content(
        &self,
        disk: &Disk,
        store: &BlobStore,
        name: &str,
        blob: &Blob,
        writing: &[(String, u32, usize, u64)],
    ) -> Result<(), String> {
        for index in self.interesting(name, blob) {
            let read = read_cluster(disk, store, blob, index)?;
            for (unit, content) in self.cluster(name, index).iter().enumerate() {
                let writes = writing
                    .iter()
                    .filter(|(other, at, part, _)| (&other[..], *at, *part) == (name, index, unit));
                let written: Vec<u64> = writes.map(|(_, _, _, tag)| *tag).collect();
                for (sector, bytes) in read[unit * UNIT..(unit + 1) * UNIT].chunks(SECTOR).enumerate() {
                    let tag = tag_of(bytes);
                    let is_right = tag.is_some_and(|tag| content.has(tag) || written.contains(&tag));
                    if !is_right && *content != Content::Any {
                        return Err(format!(
                            "{name} has {tag:x?} in cluster {index}, unit {unit}, sector {sector}, expected \
                             {content:x?} or {written:x?}"
                        ));
                    }
                }
            }
        }
        Ok(())
    }

    /// The indexes at which a blob or an ancestor has a cluster, by the model or by the store, and a few
    /// more.
    fn interesting(&self, name: &str, blob: &Blob) -> BTreeSet<u32> {
        let mut indexes: BTreeSet<u32> = blob.clusters().iter().map(|(index, _)| index).collect();
        indexes.extend([0, 1, 2, 511, 512, 513, 1024]);
        let mut next = Some(name.to_string());
        for _ in 0..100 {
            let Some(blob) = next.take().and_then(|name| self.blobs.get(&name)) else { break };
            indexes.extend(blob.own.keys());
            next = match &blob.parent {
                Parent::Blob(parent) => Some(parent.clone()),
                _ => None,
            };
        }
        indexes.retain(|index| *index < blob.clusters().length());
        indexes
    }

    /// The model of a store whose contents are right: they are certain from now on.
    pub(super) fn of(disk: &Disk, store: &BlobStore, before: &Model) -> Result<Model, String> {
        let mut model = Model::default();
        for (name, blob) in named(store)? {
            let mut own = BTreeMap::new();
            for (index, _) in blob.clusters().iter() {
                let read = read_cluster(disk, store, blob, index)?;
                let was_any = before.blobs.get(&name).and_then(|blob| blob.own.get(&index));
                let units = read.chunks(UNIT).enumerate().map(|(unit, bytes)| {
                    let tags: Option<Vec<u64>> = bytes.chunks(SECTOR).map(tag_of).collect();
                    match (tags, was_any.map(|cluster| &cluster[unit])) {
                        (None, _) | (_, Some(Content::Any)) => Content::Any,
                        (Some(mut tags), _) => {
                            tags.dedup();
                            if tags.len() > 1 { Content::Mixed(tags) } else { Content::Tags(tags) }
                        }
                    }
                });
                own.insert(index, units.collect());
            }
            let blob = ModelBlob {
                clusters: blob.clusters().length(),
                thin: blob.is_thin(),
                read_only: blob.is_read_only(),
                value: blob.xattr(b"value").unwrap_or_default().to_vec(),
                parent: parent_of(store, blob)?,
                own,
            };
            model.blobs.insert(name, blob);
        }
        Ok(model)
    }
}

fn read_cluster(disk: &Disk, store: &BlobStore, blob: &Blob, index: u32) -> Result<Vec<u8>, String> {
    let plan = store.read(blob.id(), u64::from(index) * CLUSTER as u64, CLUSTER as u64);
    let segments: Result<Vec<_>, _> = plan.and_then(Iterator::collect);
    segments.map(|segments| disk.read(&segments)).map_err(|error| error.to_string())
}

pub(super) fn named(store: &BlobStore) -> Result<BTreeMap<String, &Blob>, String> {
    let mut named = BTreeMap::new();
    for blob in store.blobs().values().filter(|blob| store.super_block().super_blob != Some(blob.id())) {
        let name = blob.xattr_text(b"name").ok_or(format!("blob {} has no name", blob.id()))?;
        if named.insert(name.into_owned(), blob).is_some() {
            return Err(format!("two blobs have the name of {}", blob.id()));
        }
    }
    Ok(named)
}

fn parent_of(store: &BlobStore, blob: &Blob) -> Result<Parent, String> {
    Ok(match blob.parent() {
        BlobParent::None => Parent::None,
        BlobParent::External(_) => Parent::External,
        BlobParent::Snapshot(parent) => {
            let parent = store.blob(*parent).ok_or(format!("{} has no parent", blob.id()))?;
            Parent::Blob(parent.xattr_text(b"name").unwrap_or_default().into_owned())
        }
    })
}

/// What no crash may leave: damage, or space that has no owner.
pub(super) fn check(store: &BlobStore) -> Result<(), String> {
    let bad = store.findings().iter().find(|finding| finding.severity() > StoreSeverity::Note);
    match bad {
        Some(bad) => Err(format!("finding: {bad}")),
        None => Ok(()),
    }
}
