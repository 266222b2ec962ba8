//! The lease of a node in a directory: a file that says that it is up, whose time of change is renewed, and
//! files that say which process it is.
//!
//! The process of a node is `holders/NODE.TERM`. The highest term counts, and the next one is taken with
//! `link(2)`: of two processes that find a lease ended one gets it.

use std::fs::{self, File};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};

use super::{ATTEMPTS_MAX, LocalMap, Publish, failed};
use crate::{LeaseHolder, LeaseOutcome, MapError, NodeId};

#[derive(Serialize, Deserialize)]
struct LeaseRecord {
    holder: LeaseHolder,
    seconds: u32,
}

fn holder_path(node: NodeId, term: u32) -> PathBuf {
    Path::new("holders").join(format!("{}.{term}", node.0))
}

impl LocalMap {
    pub(super) fn renew(
        &self,
        node: NodeId,
        holder: &LeaseHolder,
        seconds: u32,
    ) -> Result<LeaseOutcome, MapError> {
        for _ in 0..ATTEMPTS_MAX {
            let newest = self.holder(node)?;
            if let Some((term, known)) = &newest {
                if known.holder.id == holder.id {
                    self.touch(&holder_path(node, *term))?;
                    self.renew_up(node, seconds)?;
                    return Ok(LeaseOutcome::Held);
                }
                let lasts = Duration::from_secs(known.seconds.into());
                if !holder.replaces(&known.holder) && self.age(&holder_path(node, *term)) < lasts {
                    return Ok(LeaseOutcome::Taken(known.holder.clone()));
                }
            }
            let term = newest.as_ref().map_or(1, |(term, _)| term + 1);
            let record = LeaseRecord { holder: holder.clone(), seconds };
            if self.publish(&holder_path(node, term), &record, Publish::New)? {
                if let Some((before, _)) = newest {
                    let _ = fs::remove_file(self.root.join(holder_path(node, before)));
                }
                // What others see, also if the last process did not end it.
                self.publish(&up_path(node), &seconds, Publish::Replace)?;
                return Ok(LeaseOutcome::Held);
            }
        }
        let what = self.root.join(holder_path(node, 0)).display().to_string();
        Err(MapError::Storage { what, reason: "others change it all the time".to_string() })
    }

    pub(super) fn end(&self, node: NodeId, holder: &LeaseHolder) -> Result<(), MapError> {
        match self.holder(node)? {
            Some((term, known)) if known.holder.id == holder.id => {
                self.remove(&up_path(node))?;
                self.remove(&holder_path(node, term)).map(drop)
            }
            _ => Ok(()),
        }
    }

    /// The process that has the lease, or had it last.
    fn holder(&self, node: NodeId) -> Result<Option<(u32, LeaseRecord)>, MapError> {
        let prefix = format!("{}.", node.0);
        loop {
            let names = self.names(Path::new("holders"))?;
            let terms = names.iter().filter_map(|name| name.strip_prefix(&prefix)?.parse().ok());
            let Some(term) = terms.max() else { return Ok(None) };
            // One that is removed meanwhile has a newer one, or none.
            if let Some(record) = self.read(&holder_path(node, term))? {
                return Ok(Some((term, record)));
            }
        }
    }

    fn renew_up(&self, node: NodeId, seconds: u32) -> Result<(), MapError> {
        match self.touch(&up_path(node))? {
            true => Ok(()),
            false => self.publish(&up_path(node), &seconds, Publish::Replace).map(drop),
        }
    }

    /// Whether there is such a file, which is as new now.
    fn touch(&self, name: &Path) -> Result<bool, MapError> {
        let path = self.root.join(name);
        let renewed = File::options().write(true).open(&path);
        match renewed.and_then(|file| file.set_modified(SystemTime::now())) {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
            Err(error) => Err(failed(&path, &error)),
        }
    }

    /// How long ago it was renewed; for ever if it is gone.
    fn age(&self, name: &Path) -> Duration {
        let renewed = fs::metadata(self.root.join(name)).and_then(|it| it.modified());
        // A time in the future is a clock that was set.
        renewed.map_or(Duration::MAX, |renewed| renewed.elapsed().unwrap_or_default())
    }
}

fn up_path(node: NodeId) -> PathBuf {
    Path::new("up").join(node.0.to_string())
}
