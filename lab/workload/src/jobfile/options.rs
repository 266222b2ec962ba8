//! The table of options: supported ones with their parsers, and unsupported ones of fio.

mod data;
mod files;
mod limits;
mod pattern;
mod priorities;
mod rates;
mod run;
mod unsupported;
mod work;
mod zones;

use super::job::PerfJob;
use data::DATA;
use files::FILES;
pub use files::{engine_names, engine_options};
use limits::LIMITS;
use pattern::PATTERN;
use priorities::PRIORITIES;
use rates::RATES;
use run::RUN;
use unsupported::{NO_EFFECT, REFUSED};
use work::WORK;
use zones::ZONES;

type Apply = fn(&mut PerfJob, &str) -> Result<(), String>;

/// How an option is supported.
#[derive(Clone, Copy)]
pub enum Support {
    /// An option of a job, with the function that applies it.
    PerfJob(Apply),
    /// An option of the run, accepted on the command line only.
    Run,
    /// An option of fio that asks for what is done anyway, or that changes no result: accepted with a warning.
    NoEffect {
        /// The accepted values; empty for all.
        values: &'static [&'static str],
        /// Why it has no effect.
        why: &'static str,
    },
    /// An unsupported option of fio, with the reason and what to use instead.
    Refused(&'static str),
}

/// One option.
#[derive(Clone, Copy)]
pub struct OptionInfo {
    /// Name, with underscores.
    pub name: &'static str,
    /// Alternative names.
    pub aliases: &'static [&'static str],
    /// Placeholder of the value, or an example.
    pub value: &'static str,
    /// Whether the value may be omitted, which means 1.
    pub switch: bool,
    /// Help text, with differences from fio.
    pub help: &'static str,
    /// How it is supported.
    pub support: Support,
}

const fn job(
    name: &'static str,
    aliases: &'static [&'static str],
    value: &'static str,
    help: &'static str,
    apply: Apply,
) -> OptionInfo {
    OptionInfo { name, aliases, value, switch: false, help, support: Support::PerfJob(apply) }
}

const fn switch(name: &'static str, help: &'static str, apply: Apply) -> OptionInfo {
    OptionInfo { name, aliases: &[], value: "BOOL", switch: true, help, support: Support::PerfJob(apply) }
}

const fn run(name: &'static str, value: &'static str, switch: bool, help: &'static str) -> OptionInfo {
    OptionInfo { name, aliases: &[], value, switch, help, support: Support::Run }
}

const US: u64 = 1_000;
const MS: u64 = 1_000_000;
const SECOND: u64 = 1_000_000_000;

/// Options by topic.
const TABLES: [&[OptionInfo]; 11] =
    [FILES, PATTERN, ZONES, RATES, LIMITS, DATA, WORK, PRIORITIES, RUN, NO_EFFECT, REFUSED];

/// Every option, grouped by topic.
pub const OPTIONS: &[OptionInfo] = &joined::<{ length(&TABLES) }>(&TABLES);

const fn length(tables: &[&[OptionInfo]]) -> usize {
    let (mut count, mut table) = (0, 0);
    while table < tables.len() {
        (count, table) = (count + tables[table].len(), table + 1);
    }
    count
}

const fn joined<const COUNT: usize>(tables: &[&[OptionInfo]]) -> [OptionInfo; COUNT] {
    let mut options = [tables[0][0]; COUNT];
    let (mut count, mut table) = (0, 0);
    while table < tables.len() {
        let mut row = 0;
        while row < tables[table].len() {
            options[count] = tables[table][row];
            (count, row) = (count + 1, row + 1);
        }
        table += 1;
    }
    assert!(count == COUNT);
    options
}

/// Finds an option by its name or an alias, with underscores.
pub(super) fn find(name: &str) -> Option<&'static OptionInfo> {
    OPTIONS.iter().find(|option| option.name == name || option.aliases.contains(&name))
}

/// The supported name that is nearest to an unknown one, if it is near enough.
pub(super) fn nearest(name: &str) -> Option<&'static str> {
    let is_supported = |option: &&OptionInfo| !matches!(option.support, Support::Refused(_));
    let names = OPTIONS.iter().filter(is_supported);
    let names = names.flat_map(|option| std::iter::once(&option.name).chain(option.aliases));
    let near = names.map(|known| (edit_distance(name, known), *known)).min()?;
    (near.0 <= 1 + known_length(name) / 4).then_some(near.1)
}

fn known_length(name: &str) -> usize {
    name.chars().count().min(64)
}

/// The Levenshtein distance.
fn edit_distance(one: &str, other: &str) -> usize {
    let other: Vec<char> = other.chars().collect();
    let mut row: Vec<usize> = (0..=other.len()).collect();
    for (number, letter) in one.chars().take(64).enumerate() {
        let mut diagonal = row[0];
        row[0] = number + 1;
        for (at, against) in other.iter().enumerate() {
            let changed = diagonal + usize::from(letter != *against);
            diagonal = row[at + 1];
            row[at + 1] = changed.min(row[at] + 1).min(diagonal + 1);
        }
    }
    row[other.len()]
}
