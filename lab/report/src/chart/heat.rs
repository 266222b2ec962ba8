//! A table of colours.

use super::number::short;
use super::plot::cut;
use super::svg::{Anchor, Rect, Svg, text_width};

/// A value for each row and column, as a number on its colour.
#[derive(Clone, Debug)]
pub struct Heat {
    /// What a screen reader says.
    pub title: String,
    /// What the values are, with their unit.
    pub label: String,
    /// Names from left to right.
    pub columns: Vec<String>,
    /// Names and values from the top down; `None` was not measured.
    pub rows: Vec<(String, Vec<Option<f64>>)>,
    /// The values at the ends of the colours; two heat maps that are compared share them.
    pub range: (f64, f64),
}

impl Heat {
    /// Whether there is anything to draw.
    pub fn is_empty(&self) -> bool {
        !self.rows.iter().flat_map(|(_, values)| values).flatten().any(|value| value.is_finite())
    }

    /// The smallest and largest of `values`, for [`Heat::range`].
    pub fn range_of(values: impl Iterator<Item = f64>) -> (f64, f64) {
        let ends = values
            .filter(|value| value.is_finite())
            .fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), value| (low.min(value), high.max(value)));
        if ends.0 <= ends.1 { ends } else { (0.0, 1.0) }
    }

    /// The chart as an `<svg>` element; empty where there is nothing to draw.
    pub fn svg(&self) -> String {
        if self.is_empty() {
            return String::new();
        }
        let wide = self.rows.iter().map(|(name, _)| text_width(&cut(name), 11.0)).fold(0.0, f64::max);
        let (left, top, row) = (wide + 14.0, 48.0, 26.0);
        let column = ((560.0 - left) / self.columns.len().max(1) as f64).min(110.0);
        let (width, height) = (560.0, top + row * self.rows.len() as f64 + 6.0);
        let mut svg = Svg::new(width, height, &self.title);
        svg.group("ax");
        svg.text("a", 2.0, 14.0, Anchor::Start, &self.label);
        for (index, name) in self.columns.iter().enumerate() {
            let at = left + column * (index as f64 + 0.5);
            svg.text("t", at, top - 9.0, Anchor::Middle, &cut(name));
        }
        svg.end();
        for (index, (name, values)) in self.rows.iter().enumerate() {
            let y = top + row * index as f64;
            svg.text("t", left - 8.0, y + row / 2.0 + 3.8, Anchor::End, &cut(name));
            for (position, value) in values.iter().enumerate().take(self.columns.len()) {
                let Some(value) = value.filter(|value| value.is_finite()) else { continue };
                let x = left + column * position as f64;
                let (fill, dark) = self.colour(value);
                let place = Rect { x: x + 1.0, y: y + 1.0, width: column - 2.0, height: row - 2.0 };
                let column_name = &self.columns[position];
                svg.rect("q", place, Some(&fill), &format!("{column_name} · {name}: {}", short(value)));
                let class = if dark { "hd" } else { "hl" };
                svg.text(class, x + column / 2.0, y + row / 2.0 + 3.8, Anchor::Middle, &short(value));
            }
        }
        svg.finish()
    }

    /// From pale to dark along one hue after another, evenly lighter for every eye (after viridis), with
    /// logarithmic steps where the values span more than a decade. Says whether the colour is dark.
    fn colour(&self, value: f64) -> (String, bool) {
        const STOPS: [(f64, f64, f64); 6] = [
            (253.0, 244.0, 205.0),
            (190.0, 227.0, 160.0),
            (95.0, 193.0, 139.0),
            (36.0, 143.0, 142.0),
            (50.0, 92.0, 139.0),
            (64.0, 35.0, 104.0),
        ];
        let (low, high) = self.range;
        let logarithmic = low > 0.0 && high / low > 10.0;
        let part =
            if logarithmic { (value / low).ln() / (high / low).ln() } else { (value - low) / (high - low) };
        let part = if part.is_finite() { part.clamp(0.0, 1.0) } else { 0.0 };
        let place = part * (STOPS.len() - 1) as f64;
        let below = (place.floor() as usize).min(STOPS.len() - 2);
        let (a, b, t) = (STOPS[below], STOPS[below + 1], place - below as f64);
        let mix = |a: f64, b: f64| (a + (b - a) * t).round() as u8;
        let (red, green, blue) = (mix(a.0, b.0), mix(a.1, b.1), mix(a.2, b.2));
        (format!("#{red:02x}{green:02x}{blue:02x}"), part > 0.5)
    }
}
