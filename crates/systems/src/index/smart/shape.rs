//! The tree's shape in the form of every index.

use super::Smart;
use super::layout::NodeType;
use crate::index::{IndexError, Shape};
use farside_remote::Fabric;
use farside_remote::clock::Clock;

/// Size of the state of a unit of memory in bytes.
const STATE_SIZE: u64 = 8;

impl<F: Fabric + Clock> Smart<F> {
    /// Returns the shape of the tree. Reads the whole tree.
    ///
    /// # Errors
    /// [`IndexError`]; nothing was changed.
    pub async fn shape(&mut self) -> Result<Shape, IndexError> {
        let stat = self.stat().await?;
        let taken = self.client.taken_units().await?;
        let types = (NodeType::SMALLEST.0..=NodeType::MAX.0).map(NodeType);
        Ok(Shape {
            nodes: types.map(|kind| kind.slots() as u64).zip(stat.nodes).collect(),
            slots: stat.slots,
            keys: stat.leaves,
            dead: stat.dead,
            locked: stat.locked,
            depth: stat.depth,
            bytes: taken.keys().map(|(_, class)| class.size() + STATE_SIZE).sum(),
        })
    }
}
