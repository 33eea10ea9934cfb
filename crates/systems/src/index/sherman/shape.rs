//! The tree's shape in the form of every index.

use super::Sherman;
use crate::index::{IndexError, Leaves, Shape};
use farside_remote::Fabric;
use farside_remote::clock::Clock;

/// Size of the state of a unit of memory in bytes.
const STATE_SIZE: u64 = 8;

impl<F: Fabric + Clock> Sherman<F> {
    /// Returns the shape of the tree. Reads the whole tree.
    ///
    /// # Errors
    /// [`IndexError`]; nothing was changed.
    pub async fn shape(&mut self) -> Result<Shape, IndexError> {
        let stat = self.stat().await?;
        let layout = &self.client.session.layout;
        let span = layout.form.span() as u64;
        Ok(Shape {
            nodes: vec![(span, stat.inner)],
            slots: stat.records,
            leaves: Some(Leaves { count: stat.leaves, entries: span }),
            keys: stat.keys,
            dead: 0,
            locked: stat.locked,
            depth: stat.levels.saturating_sub(1),
            bytes: stat.claimed * (layout.spec.unit() + STATE_SIZE),
        })
    }
}
