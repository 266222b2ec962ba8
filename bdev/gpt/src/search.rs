//! Finding a device's table, sans-IO.

use wire_gpt::{DecodeError, ENTRIES_BYTES_MAX, GptHeader, GptTable, MBR_BYTES, PRIMARY_LBA, ProtectiveMbr};

/// Read at once, as most tables are whole in it: MBR, header and 128 entries, or these at the end.
const WINDOW_BYTES: u32 = 32 << 10;
/// Largest block: the window has two, the array of entries begins with one, and neither exceeds 1 MiB.
const BLOCK_BYTES_MAX: u32 = 512 << 10;
const _: () = assert!(ENTRIES_BYTES_MAX <= BLOCK_BYTES_MAX);

/// Finds the table of a device by reads of at most 1 MiB, one after the other and four at most: the start
/// with the MBR and the primary table, and the end with the backup table if the primary one is not whole.
///
/// [`new`](Self::new) has the first step; [`read`](Self::read) takes what a step asked for and has the next
/// one.
#[derive(Debug)]
pub struct TableSearch {
    blocks: u64,
    block_bytes: u32,
    stage: SearchStage,
    /// Why the primary table is not used, once that is so.
    primary: Option<TableError>,
}

#[derive(Debug)]
enum SearchStage {
    /// Reads the start, or the end, from block `lba` on.
    Window { lba: u64 },
    /// Reads the array of entries, which is not in the window.
    Entries { header: GptHeader },
}

/// What is to be done.
#[derive(Debug, PartialEq, Eq)]
pub enum SearchStep {
    /// Blocks are to be read.
    Read {
        /// The first one.
        lba: u64,
        /// Their number.
        blocks: u32,
    },
    /// The search has ended.
    Found(FoundTable),
    /// The search has ended: the device has no table.
    Nothing(NoTable),
}

/// The table of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FoundTable {
    /// The table.
    pub table: GptTable,
    /// Why it is the backup table, if it is.
    pub primary: Option<TableError>,
}

/// Why one of the two tables is not used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TableError {
    /// It is not a table.
    #[error(transparent)]
    Broken(#[from] DecodeError),
    /// A read failed.
    #[error("it cannot be read")]
    Unreadable,
}

/// Why a device has no table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoTable {
    /// Its blocks are not of a disk with partitions.
    #[error("no table has {blocks} blocks of {block_bytes} bytes")]
    Geometry {
        /// Number of blocks.
        blocks: u64,
        /// Their size.
        block_bytes: u32,
    },
    /// The MBR cannot be read.
    #[error("the protective MBR cannot be read")]
    Unreadable,
    /// There is no protective MBR.
    #[error("no protective MBR: {0}")]
    Unprotected(DecodeError),
    /// The protective MBR is of a device of another size.
    #[error("the protective MBR is of a device with {} blocks, not {device_blocks}", u64::from(*.mbr_blocks) + 1)]
    OtherSize {
        /// Blocks after the MBR.
        mbr_blocks: u32,
        /// Blocks of the device.
        device_blocks: u64,
    },
    /// Neither table is whole.
    #[error("the primary table: {primary}; the backup table: {backup}")]
    Broken {
        /// Why the primary table is not used.
        primary: TableError,
        /// Why the backup table is not used.
        backup: TableError,
    },
}

impl TableSearch {
    /// The search on a device, and its first step.
    pub fn new(blocks: u64, block_bytes: u32) -> (TableSearch, SearchStep) {
        let search =
            TableSearch { blocks, block_bytes, stage: SearchStage::Window { lba: 0 }, primary: None };
        let is_disk = block_bytes.is_multiple_of(MBR_BYTES as u32)
            && (MBR_BYTES as u32..=BLOCK_BYTES_MAX).contains(&block_bytes);
        let step = if blocks < 2 || !is_disk {
            SearchStep::Nothing(NoTable::Geometry { blocks, block_bytes })
        } else {
            SearchStep::Read { lba: 0, blocks: search.window_blocks() }
        };
        (search, step)
    }

    fn window_blocks(&self) -> u32 {
        let blocks = WINDOW_BYTES.div_ceil(self.block_bytes).max(2);
        u32::try_from(self.blocks).map_or(blocks, |all| all.min(blocks))
    }

    /// The next step after a read, which has its bytes, or has failed.
    ///
    /// # Panics
    /// If there are fewer bytes than were to be read.
    pub fn read(&mut self, data: Option<&[u8]>) -> SearchStep {
        let result = match &self.stage {
            SearchStage::Window { lba } => {
                let (lba, blocks) = (*lba, self.window_blocks());
                if let Some(data) = data {
                    let bytes = blocks as usize * self.block_bytes as usize;
                    assert!(data.len() >= bytes, "{} bytes of {bytes}", data.len());
                }
                if lba == 0
                    && let Err(nothing) = self.check_mbr(data)
                {
                    return SearchStep::Nothing(nothing);
                }
                self.look_into(lba, data)
            }
            SearchStage::Entries { header } => {
                let table = data.ok_or(TableError::Unreadable);
                table.and_then(|data| Ok(SearchStep::Found(self.found(GptTable::decode(header, data)?))))
            }
        };
        match (result, self.primary) {
            (Ok(step), _) => step,
            (Err(backup), Some(primary)) => SearchStep::Nothing(NoTable::Broken { primary, backup }),
            (Err(primary), None) => {
                self.primary = Some(primary);
                let blocks = self.window_blocks();
                let lba = self.blocks - u64::from(blocks);
                self.stage = SearchStage::Window { lba };
                SearchStep::Read { lba, blocks }
            }
        }
    }

    fn check_mbr(&self, data: Option<&[u8]>) -> Result<(), NoTable> {
        if self.primary.is_some() {
            // The window at the end of a small device begins with it too.
            return Ok(());
        }
        let mbr = ProtectiveMbr::decode(data.ok_or(NoTable::Unreadable)?).map_err(NoTable::Unprotected)?;
        match mbr.covers(self.blocks) {
            true => Ok(()),
            false => Err(NoTable::OtherSize { mbr_blocks: mbr.blocks, device_blocks: self.blocks }),
        }
    }

    /// Decodes the header in a window from block `lba` on, and the entries if they are there too.
    fn look_into(&mut self, lba: u64, data: Option<&[u8]>) -> Result<SearchStep, TableError> {
        let data = data.ok_or(TableError::Unreadable)?;
        let header_lba = if self.primary.is_some() { self.blocks - 1 } else { PRIMARY_LBA };
        let block_bytes = self.block_bytes as usize;
        // Both are within the window.
        let at = (header_lba - lba) as usize * block_bytes;
        let header = GptHeader::decode(&data[at..at + block_bytes])?;
        header.check_on(header_lba, self.blocks, self.block_bytes)?;
        let end = lba + u64::from(self.window_blocks());
        let blocks = header.entries_blocks(self.block_bytes);
        if header.entries_lba >= lba && header.entries_lba + u64::from(blocks) <= end {
            let at = (header.entries_lba - lba) as usize * block_bytes;
            return Ok(SearchStep::Found(self.found(GptTable::decode(&header, &data[at..])?)));
        }
        if blocks == 0 {
            return Ok(SearchStep::Found(self.found(GptTable::decode(&header, &[])?)));
        }
        let lba = header.entries_lba;
        self.stage = SearchStage::Entries { header };
        Ok(SearchStep::Read { lba, blocks })
    }

    fn found(&self, table: GptTable) -> FoundTable {
        FoundTable { table, primary: self.primary }
    }
}

#[cfg(test)]
mod tests;
