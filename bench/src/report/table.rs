//! Text tables with aligned columns.

use std::fmt;

/// A table with a heading and rows. Cells at the end of a row may be missing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Table {
    rows: Vec<Vec<String>>,
}

impl Table {
    /// Creates a table with the heading `columns` and no rows.
    pub fn new<C: Into<String>>(columns: impl IntoIterator<Item = C>) -> Self {
        let mut table = Self::default();
        table.push(columns);
        table
    }

    /// Adds a row at the end of the table.
    pub fn push<C: Into<String>>(&mut self, cells: impl IntoIterator<Item = C>) {
        self.rows.push(cells.into_iter().map(Into::into).collect());
    }

    fn widths(&self) -> Vec<usize> {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let cells = |column: usize| self.rows.iter().filter_map(move |row| row.get(column));
        (0..columns).map(|column| cells(column).map(|cell| cell.chars().count()).max().unwrap_or(0)).collect()
    }
}

/// Prints one line for each row, with numbers right-aligned, other cells left-aligned, and two blanks between columns.
impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let widths = self.widths();
        for row in &self.rows {
            let mut line = String::new();
            for (cell, &width) in row.iter().zip(&widths) {
                let padding = " ".repeat(width - cell.chars().count());
                let (before, after) = if is_number(cell) { (&*padding, "") } else { ("", &*padding) };
                line.push_str(&format!("{before}{cell}{after}  "));
            }
            writeln!(f, "{}", line.trim_end())?;
        }
        Ok(())
    }
}

fn is_number(cell: &str) -> bool {
    cell.starts_with(|first: char| first.is_ascii_digit() || first == '-' || first == '+')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up() {
        let mut table = Table::new(["system", "ops/s"]);
        table.push(["prism-kv", "7"]);
        table.push(["é", "1234567", "x"]);
        table.push([""; 0]);
        assert_eq!(table.to_string(), "system    ops/s\nprism-kv        7\né         1234567  x\n\n");
    }
}
