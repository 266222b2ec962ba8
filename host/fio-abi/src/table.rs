//! The table of functions, `ioengine_ops`, and the engine's option.

use std::ffi::{c_char, c_int, c_uint, c_void};

use crate::engine::{EngineDefinition, OPTIONS_MAX, print_line};
use crate::version::FioVersion;
use crate::{functions, loaded, unit};

/// Bytes of the largest table.
const TABLE_BYTES: usize = 288 + 16;
/// Offsets that are the same in all versions.
const NAME_AT: usize = 16;
const VERSION_AT: usize = 24;
const FLAGS_AT: usize = 28;
const INIT_AT: usize = 48;
const QUEUE_AT: usize = 72;
const COMMIT_AT: usize = 80;
const GETEVENTS_AT: usize = 88;
const EVENT_AT: usize = 96;
/// `cancel`, or `cleanup` where there is none.
const CANCEL_AT: usize = 112;
/// From `cleanup` on.
const OPEN_FILE_AFTER: usize = 8;
const CLOSE_FILE_AFTER: usize = 16;
const INVALIDATE_AFTER: usize = 24;
const GET_FILE_SIZE_AFTER: usize = 40;

/// `FIO_RAWIO`, `FIO_DISKLESSIO`, `FIO_NOEXTEND`, `FIO_NODISKUTIL`: there is no file that fio could make,
/// extend or find statistics of.
const FLAGS: c_int = 1 << 1 | 1 << 2 | 1 << 3 | 1 << 4;

/// `fio_option`, the same in all versions. An array of them ends with one without a name.
#[repr(C)]
struct FioOption {
    name: *const c_char,
    long_name: *const c_char,
    alias: *const c_char,
    kind: c_uint,
    offsets: [c_uint; 6],
    value_max: u64,
    value_min: c_int,
    float_max: f64,
    float_min: f64,
    interval: c_uint,
    length_max: c_uint,
    negate: c_int,
    priority: c_int,
    callback: *const c_void,
    help: *const c_char,
    default: *const c_char,
    values: [[u64; 5]; 32],
    parent: *const c_char,
    hide: [c_int; 2],
    inverse: [*const c_void; 2],
    verify: *const c_void,
    profile: [*const c_void; 2],
    category: u64,
    group: u64,
    gui_data: *const c_void,
    time: [c_int; 5],
}
const _: () = {
    use std::mem::offset_of;
    assert!(offset_of!(FioOption, kind) == 24 && offset_of!(FioOption, offsets) == 28);
    assert!(offset_of!(FioOption, length_max) == 92 && offset_of!(FioOption, callback) == 104);
    assert!(offset_of!(FioOption, help) == 112 && offset_of!(FioOption, category) == 1464);
    assert!(offset_of!(FioOption, group) == 1472 && size_of::<FioOption>() == 1512);
};

/// `FIO_OPT_STR_STORE`.
const OPTION_TEXT: c_uint = 6;
/// `FIO_OPT_C_ENGINE`, and no group.
const OPTION_CATEGORY: u64 = 1 << 6;
/// Of the memory that fio has for options: a pointer that it uses, and the texts.
const OPTION_BYTES: c_int = 8 + 8 * OPTIONS_MAX as c_int;
const OPTION_TEXT_AT: c_uint = 8;
const OPTION_LENGTH_MAX: c_uint = 4096;

impl EngineDefinition {
    /// The library's `get_ioengine`, which [`export_engine!`](crate::export_engine) exports: sets `ops` to
    /// the table of this engine for the fio that loads it, or to null with a line on standard error that says
    /// why there is none.
    ///
    /// # Safety
    /// `ops` is where fio takes a pointer from.
    pub unsafe fn get_ioengine(&'static self, ops: *mut *mut c_void) {
        let table = make(self).unwrap_or_else(|reason| {
            print_line(self.name, &reason);
            std::ptr::null_mut()
        });
        // SAFETY: the caller's promise.
        unsafe { ops.write(table) };
    }
}

/// Makes the table for the fio that this process is. It lives as long as the process.
pub(crate) fn make(definition: &'static EngineDefinition) -> Result<*mut c_void, String> {
    if cfg!(panic = "abort") {
        return Err("this library was built to abort on a panic; build it with ./x plugin fio".to_string());
    }
    let version = FioVersion::of_process()?;
    let loaded = loaded::load(definition, version);
    let table = Box::leak(Box::new(fill(loaded.definition, &loaded.version)));
    Ok(std::ptr::from_mut(table).cast())
}

impl FioVersion {
    /// The offsets and numbers that an engine uses, by their names in fio's headers, for comparison with
    /// them.
    pub fn layouts(&self) -> Vec<(&'static str, i64)> {
        let mut layouts = vec![
            ("FIO_IOOPS_VERSION", self.ioops.into()),
            ("FIO_NO_OFFLOAD", self.no_offload.into()),
            ("ioengine_ops.option_struct_size", self.options_at as i64),
            ("ioengine_ops.options", self.options_at as i64 + 8),
        ];
        layouts.extend(offsets(self).map(|(field, at)| (field, at as i64)));
        layouts.extend(unit::offsets(self.unit_offset_at).map(|(field, at)| (field, at as i64)));
        layouts
    }
}

/// Where the table of a version has what it has.
fn offsets(version: &FioVersion) -> impl Iterator<Item = (&'static str, usize)> {
    let cleanup = cleanup_at(version);
    [
        ("ioengine_ops.name", NAME_AT),
        ("ioengine_ops.version", VERSION_AT),
        ("ioengine_ops.flags", FLAGS_AT),
        ("ioengine_ops.init", INIT_AT),
        ("ioengine_ops.queue", QUEUE_AT),
        ("ioengine_ops.commit", COMMIT_AT),
        ("ioengine_ops.getevents", GETEVENTS_AT),
        ("ioengine_ops.event", EVENT_AT),
        ("ioengine_ops.cleanup", cleanup),
        ("ioengine_ops.open_file", cleanup + OPEN_FILE_AFTER),
        ("ioengine_ops.close_file", cleanup + CLOSE_FILE_AFTER),
        ("ioengine_ops.invalidate", cleanup + INVALIDATE_AFTER),
        ("ioengine_ops.get_file_size", cleanup + GET_FILE_SIZE_AFTER),
        ("fio_option.type", std::mem::offset_of!(FioOption, kind)),
        ("fio_option.off1", std::mem::offset_of!(FioOption, offsets)),
        ("fio_option.maxlen", std::mem::offset_of!(FioOption, length_max)),
        ("fio_option.cb", std::mem::offset_of!(FioOption, callback)),
        ("fio_option.help", std::mem::offset_of!(FioOption, help)),
        ("fio_option.category", std::mem::offset_of!(FioOption, category)),
        ("sizeof fio_option", size_of::<FioOption>()),
        ("FIO_OPT_STR_STORE", OPTION_TEXT as usize),
        ("FIO_OPT_C_ENGINE", OPTION_CATEGORY as usize),
    ]
    .into_iter()
}

fn cleanup_at(version: &FioVersion) -> usize {
    if version.has_cancel { CANCEL_AT + 8 } else { CANCEL_AT }
}

/// A table in words.
fn fill(definition: &'static EngineDefinition, version: &FioVersion) -> [u64; TABLE_BYTES / 8] {
    let mut table = [0; TABLE_BYTES / 8];
    let mut put = |at: usize, word: u64| table[at / 8] = word;
    let pair =
        |low: c_int, high: c_int| u64::from(low.cast_unsigned()) | u64::from(high.cast_unsigned()) << 32;
    put(NAME_AT, definition.name.as_ptr() as u64);
    const { assert!(FLAGS_AT == VERSION_AT + 4) };
    put(VERSION_AT, pair(version.ioops, FLAGS | version.no_offload));
    put(INIT_AT, functions::init as *const c_void as u64);
    put(QUEUE_AT, functions::queue as *const c_void as u64);
    put(COMMIT_AT, functions::commit as *const c_void as u64);
    put(GETEVENTS_AT, functions::getevents as *const c_void as u64);
    put(EVENT_AT, functions::event as *const c_void as u64);
    let cleanup = cleanup_at(version);
    put(cleanup, functions::cleanup as *const c_void as u64);
    put(cleanup + OPEN_FILE_AFTER, functions::open_file as *const c_void as u64);
    put(cleanup + CLOSE_FILE_AFTER, functions::close_file as *const c_void as u64);
    put(cleanup + INVALIDATE_AFTER, functions::invalidate as *const c_void as u64);
    put(cleanup + GET_FILE_SIZE_AFTER, functions::get_file_size as *const c_void as u64);
    put(version.options_at, pair(OPTION_BYTES, 0));
    put(version.options_at + 8, options(definition) as u64);
    table
}

fn options(definition: &'static EngineDefinition) -> *mut FioOption {
    // SAFETY: null pointers and zeroes are valid values of every field.
    let mut options: Box<[FioOption; OPTIONS_MAX + 1]> = Box::new(unsafe { std::mem::zeroed() });
    let callbacks: [*const c_void; OPTIONS_MAX] =
        [functions::set_option::<0> as *const c_void, functions::set_option::<1> as *const c_void];
    for (at, (option, callback)) in definition.options.iter().zip(callbacks).enumerate() {
        let entry = &mut options[at];
        entry.name = option.name.as_ptr();
        entry.long_name = entry.name;
        entry.help = option.help.as_ptr();
        entry.kind = OPTION_TEXT;
        entry.offsets[0] = OPTION_TEXT_AT + 8 * at as c_uint;
        entry.length_max = OPTION_LENGTH_MAX;
        entry.callback = callback;
        entry.category = OPTION_CATEGORY;
    }
    Box::leak(options).as_mut_ptr()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::EngineOption;

    static DEFINITION: EngineDefinition = EngineDefinition {
        name: c"test",
        options: &[
            EngineOption { name: c"test_config", help: c"help", set: |_| Ok(()) },
            EngineOption { name: c"test_cluster", help: c"help", set: |_| Ok(()) },
        ],
        file_bytes: |_| Ok(0),
        start: || Err("no".to_string()),
    };

    #[test]
    fn the_table_has_its_functions_where_each_version_looks_for_them() {
        for (name, cleanup, options_at) in
            [("fio-3.33", 120, 248), ("fio-3.39", 120, 272), ("fio-3.40", 120, 280), ("fio-3.42", 112, 272)]
        {
            let table = fill(&DEFINITION, &FioVersion::named(name).unwrap());
            let word = |at: usize| table[at / 8];
            assert_eq!(word(72), functions::queue as *const c_void as u64, "{name}");
            assert_eq!(word(cleanup), functions::cleanup as *const c_void as u64, "{name}");
            assert_eq!(word(cleanup + 40), functions::get_file_size as *const c_void as u64, "{name}");
            assert_eq!(word(options_at), 24, "{name}");
            assert_ne!(word(options_at + 8), 0, "{name}");
            // setup, post_init, prep, errdetails: fio's own.
            assert_eq!([word(40), word(56), word(64), word(104)], [0; 4], "{name}");
        }
    }

    #[test]
    fn a_program_that_is_not_fio_gets_no_table() {
        assert!(make(&DEFINITION).unwrap_err().contains("not fio"));
    }
}
