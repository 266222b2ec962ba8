//! What files must have, by name.

use std::collections::BTreeMap;

use crate::fs::LOG_BLOCK_BYTES;

/// A file.
#[derive(Clone, Debug, Default)]
pub(super) struct ModelFile {
    /// What readers see.
    pub(super) current: Vec<u8>,
    /// What a power failure leaves, if the file exists then.
    pub(super) durable: Option<Vec<u8>>,
    /// What was written since, and may be there instead.
    pub(super) overwrites: Vec<(usize, Vec<u8>)>,
    /// It was synced as a log: the length may be ahead, over zeroes and what was appended since.
    pub(super) is_log: bool,
}

impl ModelFile {
    fn synced(&mut self) {
        self.durable = Some(self.current.clone());
        self.overwrites.clear();
        self.is_log = false;
    }
}

impl ModelFile {
    /// What a log may have behind what was synced: what was appended, without gaps between its blocks, or
    /// zero.
    fn check_ahead(&self, name: &str, durable: usize, content: &[u8]) -> Result<(), String> {
        let same = content.iter().zip(&self.current).take_while(|(found, written)| found == written).count();
        for at in (durable..content.len()).filter(|at| content[*at] != 0) {
            let block = at / LOG_BLOCK_BYTES as usize * LOG_BLOCK_BYTES as usize;
            if self.current.get(at) != Some(&content[at]) || block > same.max(durable) {
                return Err(format!("the log {name} has {} at {at}, synced {durable}", content[at]));
            }
        }
        Ok(())
    }
}

/// A request, by names.
#[derive(Clone, Debug)]
pub(super) enum Op {
    Create { name: String },
    Append { name: String, data: Vec<u8> },
    Write { name: String, offset: usize, data: Vec<u8> },
    Truncate { name: String, size: usize },
    Sync { name: String },
    SyncLog { name: String },
    Read { name: String, offset: usize, length: usize },
    Close { name: String },
    Rename { from: String, to: String },
    Unlink { name: String },
    RenameDirectory { from: String, to: String },
}

impl Op {
    /// The names that it is about; none for all.
    pub(super) fn names(&self) -> Vec<&String> {
        match self {
            Op::Create { name }
            | Op::Append { name, .. }
            | Op::Write { name, .. }
            | Op::Truncate { name, .. }
            | Op::Sync { name }
            | Op::SyncLog { name }
            | Op::Read { name, .. }
            | Op::Close { name }
            | Op::Unlink { name } => vec![name],
            Op::Rename { from, to } => vec![from, to],
            Op::RenameDirectory { .. } => Vec::new(),
        }
    }
}

#[derive(Clone, Debug, Default)]
pub(super) struct Model {
    pub(super) files: BTreeMap<String, ModelFile>,
}

impl Model {
    /// A request begins: what it writes may be there from now on.
    pub(super) fn begin(&mut self, op: &Op) {
        if let Op::Write { name, offset, data } = op
            && let Some(file) = self.files.get_mut(name)
        {
            file.overwrites.push((*offset, data.clone()));
        }
    }

    /// A request has ended, or may have happened.
    pub(super) fn apply(&mut self, op: &Op) {
        match op {
            Op::Create { name } => drop(self.files.insert(name.clone(), ModelFile::default())),
            Op::Append { name, data } => {
                if let Some(file) = self.files.get_mut(name) {
                    file.current.extend(data);
                }
            }
            Op::Write { name, offset, data } => {
                if let Some(file) = self.files.get_mut(name) {
                    let end = offset + data.len();
                    file.current.resize(file.current.len().max(end), 0);
                    file.current[*offset..end].copy_from_slice(data);
                }
            }
            Op::Truncate { name, size } => {
                if let Some(file) = self.files.get_mut(name) {
                    file.current.resize(*size, 0);
                    if let Some(durable) = &mut file.durable {
                        durable.truncate(*size);
                    }
                }
            }
            Op::Sync { name } => {
                if let Some(file) = self.files.get_mut(name) {
                    file.synced();
                }
            }
            Op::SyncLog { name } => {
                if let Some(file) = self.files.get_mut(name) {
                    file.synced();
                    file.is_log = true;
                }
            }
            Op::Rename { from, to } => {
                if let Some(mut file) = self.files.remove(from) {
                    file.synced();
                    self.files.insert(to.clone(), file);
                }
            }
            Op::Unlink { name } => drop(self.files.remove(name)),
            Op::RenameDirectory { from, to } => {
                let prefix = format!("{from}/");
                let moved = self.files.extract_if(.., |name, _| name.starts_with(&prefix));
                let moved: Vec<_> = moved.collect();
                for (name, file) in moved {
                    self.files.insert(format!("{to}/{}", &name[prefix.len()..]), file);
                }
            }
            Op::Close { name } => {
                if let Some(file) = self.files.get_mut(name) {
                    file.is_log = false;
                }
            }
            Op::Read { .. } => {}
        }
    }

    /// Whether files are what a power failure may leave.
    pub(super) fn check(&self, found: &BTreeMap<String, Vec<u8>>) -> Result<(), String> {
        for name in found.keys() {
            if self.files.get(name).is_none_or(|file| file.durable.is_none()) {
                return Err(format!("{name} is there"));
            }
        }
        for (name, file) in &self.files {
            let Some(durable) = &file.durable else { continue };
            let Some(content) = found.get(name) else { return Err(format!("{name} is not there")) };
            if file.is_log && content.len() > durable.len() {
                file.check_ahead(name, durable.len(), content)?;
            } else if content.len() != durable.len() {
                return Err(format!("{name} has {} bytes instead of {}", content.len(), durable.len()));
            }
            let is_written = |at: usize, byte: u8| {
                let mut writes = file.overwrites.iter();
                writes.any(|(offset, data)| at >= *offset && data.get(at - offset) == Some(&byte))
            };
            let wrong =
                (0..durable.len()).find(|at| content[*at] != durable[*at] && !is_written(*at, content[*at]));
            if let Some(at) = wrong {
                return Err(format!("{name} has {} at {at} instead of {}", content[at], durable[at]));
            }
        }
        Ok(())
    }
}
