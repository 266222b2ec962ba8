//! Assigns colours and marks to series names, consistently across charts.

/// Number of colours in the page's style sheet (classes `c0`, `c1`, …).
pub(crate) const COLOURS: usize = 12;
/// Number of shapes of marks.
pub(crate) const MARKS: usize = 8;

/// Schedulers, and the number of colours that they use. A scheduler's colour and mark are its index.
const SCHEDULERS: [&str; 4] = ["none", "bfq", "kyber", "mq-deadline"];

/// Stacks under the names of the lab, the studies and the load generators. A stack's mark is its index; its colour
/// follows those of the schedulers.
const STACKS: [&[&str]; 8] = [
    &["psync"],
    &["aio", "libaio"],
    &["iou", "io_uring"],
    &["iou-c", "io_uring-poll"],
    &["iou-s", "io_uring-sqpoll"],
    &["ringbolt", "ringbolt-nvme"],
    &["spdk", "spdk-fio"],
    &["spdk-perf"],
];

/// Classes of functions in a profile, which share no chart with schedulers and stacks.
const CLASSES: [&str; 8] =
    ["generator", "I/O library", "block layer", "NVMe driver", "kernel", "scheduler", "idle", "locks"];

/// The place of a scheduler or a stack among all, in the order of charts and tables; other names are last.
pub(crate) fn name_rank(name: &str) -> usize {
    let scheduler = SCHEDULERS.iter().position(|known| *known == name);
    scheduler.or(STACKS.iter().position(|names| names.contains(&name))).unwrap_or(usize::MAX)
}

/// How a series is drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SeriesStyle {
    /// Index of the colour, below [`COLOURS`].
    pub(crate) colour: usize,
    /// Index of the shape of marks, below [`MARKS`].
    pub(crate) mark: usize,
}

/// The stack and the scheduler that a series name mentions, as indices.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
struct Mentioned {
    stack: Option<usize>,
    scheduler: Option<usize>,
}

impl Mentioned {
    fn in_name(name: &str) -> Mentioned {
        let mut found = Mentioned::default();
        for word in name.split(['/', ',', ' ']) {
            found.stack = found.stack.or(STACKS.iter().position(|names| names.contains(&word)));
            found.scheduler = found.scheduler.or(SCHEDULERS.iter().position(|known| *known == word));
        }
        found
    }

    /// The colour of the scheduler and the mark of the stack; what is not mentioned takes both from the other.
    fn style(self) -> Option<SeriesStyle> {
        let colour = self.scheduler.or(self.stack.map(|stack| SCHEDULERS.len() + stack))?;
        Some(SeriesStyle { colour, mark: self.stack.or(self.scheduler)? })
    }
}

/// The styles of `names`, in order. A scheduler or a stack has the same style in every chart, whatever else is in it,
/// unless all series of the chart mention it. Other names get the least used colour; names with the same scheduler or
/// stack share its colour and differ in their marks.
pub(crate) fn styles<'a>(names: impl Iterator<Item = &'a str>) -> Vec<SeriesStyle> {
    let names: Vec<&str> = names.collect();
    let mut distinct: Vec<(&str, Mentioned)> = Vec::new();
    for name in &names {
        if !distinct.iter().any(|(known, _)| known == name) {
            distinct.push((name, Mentioned::in_name(name)));
        }
    }
    let (stack, scheduler) = (shared(&distinct, |one| one.stack), shared(&distinct, |one| one.scheduler));
    for (_, mentioned) in &mut distinct {
        mentioned.stack = mentioned.stack.filter(|_| !stack);
        mentioned.scheduler = mentioned.scheduler.filter(|_| !scheduler);
    }
    let known = |name: &str| STACKS.concat().contains(&name) || SCHEDULERS.contains(&name);
    // Plain names first, so that they never yield their mark to a longer name.
    distinct.sort_by_key(|(name, mentioned)| (!known(name), mentioned.style().is_none()));
    let mut taken: Vec<(&str, SeriesStyle)> = Vec::new();
    for (name, mentioned) in &distinct {
        let class = CLASSES.iter().position(|class| class == name);
        let wanted = mentioned.style().or(class.map(|index| SeriesStyle { colour: index, mark: index }));
        taken.push((name, free_style(wanted, &taken)));
    }
    let style = |name: &&str| {
        let found = taken.iter().find(|(known, _)| known == name);
        found.map_or(SeriesStyle { colour: 0, mark: 0 }, |(_, style)| *style)
    };
    names.iter().map(style).collect()
}

/// Whether all of several series mention the same stack or scheduler, which then tells none of them apart.
fn shared(distinct: &[(&str, Mentioned)], of: impl Fn(&Mentioned) -> Option<usize>) -> bool {
    let mut found = distinct.iter().map(|(_, mentioned)| of(mentioned));
    let first = found.next().flatten();
    distinct.len() > 1 && first.is_some() && found.all(|other| other == first)
}

/// `wanted`, with the least used mark of its colour if the style is taken; without a wish, the least used colour.
fn free_style(wanted: Option<SeriesStyle>, taken: &[(&str, SeriesStyle)]) -> SeriesStyle {
    let of_colour = |colour: usize| taken.iter().filter(move |(_, style)| style.colour == colour);
    match wanted {
        Some(style) if taken.iter().all(|(_, other)| *other != style) => style,
        _ => {
            let least_used = || (0..COLOURS).min_by_key(|colour| of_colour(*colour).count()).unwrap_or(0);
            let colour = wanted.map_or_else(least_used, |style| style.colour);
            let uses = |mark: &usize| of_colour(colour).filter(|(_, style)| style.mark == *mark).count();
            let mark = (0..MARKS).map(|step| (colour + step) % MARKS).min_by_key(uses).unwrap_or(0);
            SeriesStyle { colour, mark }
        }
    }
}

/// The place of a name in the order of all charts: schedulers and stacks in the order of their tables, then others.
pub(crate) fn canonical_rank(name: &str) -> usize {
    let mentioned = Mentioned::in_name(name);
    let (schedulers, stacks) = (SCHEDULERS.len(), STACKS.len());
    mentioned.scheduler.or(mentioned.stack.map(|stack| schedulers + stack)).unwrap_or(schedulers + stacks)
}
