//! The log page of a discovery controller.

use wire_nvme::Sqe;
use wire_nvme::admin::GetLogPage;
use wire_nvme::log::{DiscoveryEntry, DiscoveryHeader, LogId};

use super::association::Association;
use super::queue::FabricsQueue;
use crate::shared::AdminData;

/// Maximum number of entries that are read from one discovery controller.
const ENTRIES_MAX: u64 = 1024;
/// Attempts to read a log page that changes while it is read.
const READS_MAX: u32 = 8;

/// Reads the discovery log page consistently: all entries of one generation counter, at most 1024. Entries of
/// unknown types are skipped.
///
/// # Errors
/// A command fails, an answer is invalid, or the page changes during each attempt; the text says so.
pub async fn read_log<Q: FabricsQueue>(
    association: &mut Association<Q>,
) -> Result<Vec<DiscoveryEntry>, String> {
    let page = |offset, length| GetLogPage {
        lid: LogId::Discovery.to_wire(),
        offset,
        length_bytes: length,
        ..GetLogPage::default()
    };
    for _ in 0..READS_MAX {
        let header = page(0, DiscoveryHeader::SIZE as u64).to_sqe(0);
        let header = header_of(&read_part(association, header, DiscoveryHeader::SIZE).await?)?;
        let count = header.numrec.min(ENTRIES_MAX);
        let mut entries = Vec::new();
        for index in 0..count {
            let offset = DiscoveryHeader::SIZE as u64 + index * DiscoveryEntry::SIZE as u64;
            let sqe = page(offset, DiscoveryEntry::SIZE as u64).to_sqe(0);
            let data = read_part(association, sqe, DiscoveryEntry::SIZE).await?;
            let bytes: &[u8; DiscoveryEntry::SIZE] = data.first_chunk().expect("an entry was requested");
            entries.extend(DiscoveryEntry::decode(bytes));
        }
        let recheck = page(0, DiscoveryHeader::SIZE as u64).to_sqe(0);
        let recheck = read_part(association, recheck, DiscoveryHeader::SIZE).await?;
        if header_of(&recheck)?.genctr == header.genctr {
            return Ok(entries);
        }
    }
    Err("the discovery log page changed during each attempt to read it".into())
}

async fn read_part<Q: FabricsQueue>(
    association: &mut Association<Q>,
    sqe: Sqe,
    length: usize,
) -> Result<Vec<u8>, String> {
    let answer = association.admin(sqe, AdminData::In(length)).await;
    answer.map(|answer| answer.data).map_err(|error| format!("the discovery log page: {error}"))
}

fn header_of(data: &[u8]) -> Result<DiscoveryHeader, String> {
    let bytes: &[u8; DiscoveryHeader::SIZE] = data.first_chunk().expect("a header was requested");
    DiscoveryHeader::decode(bytes).map_err(|error| format!("invalid discovery log page: {error}"))
}
