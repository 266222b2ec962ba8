//! Heat maps.

use super::legend::WIDTH;
use super::number::format_number;
use super::plot::truncate_label;
use super::svg::{Anchor, ChartData, FONT_SLACK, Rect, Svg, text_width};

/// A heat map: a number on a coloured cell for each row and column.
#[derive(Clone, Debug)]
pub struct Heatmap {
    /// The accessible name (`aria-label`).
    pub title: String,
    /// The description of the values, with their unit.
    pub label: String,
    /// The title of the columns.
    pub x_label: String,
    /// The title of the rows.
    pub y_label: String,
    /// Column labels from left to right.
    pub columns: Vec<String>,
    /// Row labels and values from the top down; `None` is a value that was not measured.
    pub rows: Vec<(String, Vec<Option<f64>>)>,
    /// The values at both ends of the colour scale; heat maps that are compared share one range.
    pub range: (f64, f64),
}

impl Heatmap {
    /// Whether the heat map has no finite value.
    pub fn is_empty(&self) -> bool {
        !self.rows.iter().flat_map(|(_, values)| values).flatten().any(|value| value.is_finite())
    }

    /// Minimum and maximum of the finite `values`, or (0, 1) if there are none, for [`Heat::range`].
    pub fn range_of(values: impl Iterator<Item = f64>) -> (f64, f64) {
        let ends = values
            .filter(|value| value.is_finite())
            .fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), value| (low.min(value), high.max(value)));
        if ends.0 <= ends.1 { ends } else { (0.0, 1.0) }
    }

    /// The chart as an `<svg>` element; an empty string if it has no finite value.
    pub fn svg(&self) -> String {
        if self.is_empty() {
            return String::new();
        }
        let wide =
            self.rows.iter().map(|(name, _)| text_width(&truncate_label(name), 11.0)).fold(0.0, f64::max);
        let y_label = truncate_label(&self.y_label);
        let (left, top, row) = (wide.max(text_width(&y_label, 11.5)) * FONT_SLACK + 10.0, 66.0, 26.0);
        let column = ((WIDTH - left) / self.columns.len().max(1) as f64).min(110.0);
        let (width, height) = (WIDTH, top + row * self.rows.len() as f64 + 6.0);
        let columns = [&*self.y_label, &self.x_label, &self.label];
        let mut svg = Svg::with_label(width, height, &self.title, &columns, &self.label);
        svg.group("ax");
        let middle = left + column * self.columns.len() as f64 / 2.0;
        svg.text("a", middle, top - 28.0, Anchor::Middle, &self.x_label);
        svg.text("a", left - 8.0, top - 9.0, Anchor::End, &y_label);
        // Names that are wider than their columns are left out alternately.
        let widest =
            self.columns.iter().map(|name| text_width(&truncate_label(name), 11.0)).fold(0.0, f64::max);
        let every = ((widest + 6.0) / column).ceil().max(1.0) as usize;
        for (index, name) in self.columns.iter().enumerate().step_by(every) {
            let at = left + column * (index as f64 + 0.5);
            svg.text("t", at, top - 9.0, Anchor::Middle, &truncate_label(name));
        }
        svg.end();
        let mut data = ChartData::default();
        for (name, values) in &self.rows {
            for (column_name, value) in self.columns.iter().zip(values) {
                data.push(&[name, column_name], &[value.unwrap_or(f64::NAN)]);
            }
        }
        svg.data_group("hm", &data);
        for (index, (name, values)) in self.rows.iter().enumerate() {
            let y = top + row * index as f64;
            svg.text("t", left - 8.0, y + row / 2.0 + 3.8, Anchor::End, &truncate_label(name));
            for (position, value) in values.iter().enumerate().take(self.columns.len()) {
                let Some(value) = value.filter(|value| value.is_finite()) else { continue };
                let x = left + column * position as f64;
                let (fill, dark) = self.colour(value);
                let place = Rect { x: x + 1.0, y: y + 1.0, width: column - 2.0, height: row - 2.0 };
                let column_name = &self.columns[position];
                svg.rect(
                    "q",
                    place,
                    Some(&fill),
                    &format!("{column_name} · {name}: {}", format_number(value)),
                );
                let (class, text) = (if dark { "hd" } else { "hl" }, format_number(value));
                // Elsewhere the tooltip and the table have it.
                if text_width(&text, 10.5) < column {
                    svg.text(class, x + column / 2.0, y + row / 2.0 + 3.8, Anchor::Middle, &text);
                }
            }
        }
        svg.end();
        svg.finish()
    }

    /// The colour of a value, and whether it is dark. The scale runs from pale to dark with perceptually
    /// uniform lightness, modelled on viridis; it is logarithmic if the range spans more than a decade.
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
        let fraction =
            if logarithmic { (value / low).ln() / (high / low).ln() } else { (value - low) / (high - low) };
        let fraction = if fraction.is_finite() { fraction.clamp(0.0, 1.0) } else { 0.0 };
        let position = fraction * (STOPS.len() - 1) as f64;
        let below = (position.floor() as usize).min(STOPS.len() - 2);
        let (a, b, t) = (STOPS[below], STOPS[below + 1], position - below as f64);
        let mix = |a: f64, b: f64| (a + (b - a) * t).round() as u8;
        let (red, green, blue) = (mix(a.0, b.0), mix(a.1, b.1), mix(a.2, b.2));
        (format!("#{red:02x}{green:02x}{blue:02x}"), is_dark([red, green, blue]))
    }
}

/// Whether white text on a colour has more contrast than black text; the better one has at least 4.5 on any colour
/// (WCAG 2.2, 1.4.3).
fn is_dark(channels: [u8; 3]) -> bool {
    let linear = |channel: u8| {
        let value = f64::from(channel) / 255.0;
        if value <= 0.04045 { value / 12.92 } else { ((value + 0.055) / 1.055).powf(2.4) }
    };
    let [red, green, blue] = channels.map(linear);
    0.2126 * red + 0.7152 * green + 0.0722 * blue < 0.179
}
