//! Volumes that are striped over several block stores: which part of which volume a store holds, and what the stores
//! are called.
//!
//! A volume called `NAME` has the store `NAME`, its *head*. If it is striped, the head's stripe has index 0, and the
//! other stores are called `NAME.V.I`, where V is the first half of the volume's number in hexadecimal, and I the
//! index. Block `b` of the volume is block `b / count` of the store with index `b % count`.
//!
//! Invariant: the stores of two volumes never mix, since all stores of a volume have its number, which is random.
//! Invariant: a volume exists if and only if its head does. The head is created last and dropped first.

use serde::{Deserialize, Serialize};

/// Largest number of stores of a volume.
pub const STRIPES_MAX: u32 = 1 << 10;
/// Length of the longest name of a striped volume. With the suffix, it is the name of a store.
pub const NAME_MAX: usize = 50;

/// Part of a volume that one store holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Stripe {
    /// Number of the volume: random, and the same in all of its stores.
    pub volume: u64,
    /// Index of the store.
    pub index: u32,
    /// Number of stores of the volume.
    pub count: u32,
}

/// The part of a store's parameters that says what a volume needs to know. Every block store has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub struct Shape {
    /// Length of a block in bytes.
    pub block: u32,
    /// Number of blocks of the store.
    pub blocks: u64,
    /// Part of a volume that the store holds; absent if the store is a volume of its own.
    #[serde(default)]
    pub stripe: Option<Stripe>,
}

impl Stripe {
    /// Checks that a volume can have this stripe.
    ///
    /// # Errors
    /// The index or the number of stores is impossible.
    pub fn check(&self) -> Result<(), String> {
        match (1..=STRIPES_MAX).contains(&self.count) && self.index < self.count {
            true => Ok(()),
            false => Err(format!(
                "stripe {} of {} is not possible: a volume has 1 to {STRIPES_MAX} stores, counted from 0",
                self.index, self.count
            )),
        }
    }

    /// Name of the store that holds this part of the volume called `name`.
    pub fn store_name(&self, name: &str) -> String {
        match self.index {
            0 => name.to_owned(),
            index => format!("{name}.{:08x}.{index}", self.volume >> 32),
        }
    }

    /// Name of the volume whose part the store called `store` holds; `None` if a store with this stripe has another
    /// name.
    pub fn volume_name<'a>(&self, store: &'a str) -> Option<&'a str> {
        match self.index {
            0 => Some(store),
            index => store.strip_suffix(&format!(".{:08x}.{index}", self.volume >> 32)),
        }
    }

    /// Number of blocks of this part of a volume with `blocks` blocks.
    pub fn share(&self, blocks: u64) -> u64 {
        let (index, count) = (u64::from(self.index), u64::from(self.count));
        blocks / count + u64::from(index < blocks % count)
    }
}

impl Shape {
    /// Number of bytes of stores with these shapes, at most the largest number: nodes may describe any stores.
    pub fn bytes<'a>(shapes: impl IntoIterator<Item = &'a Shape>) -> u64 {
        shapes
            .into_iter()
            .fold(0, |sum, shape| sum.saturating_add(shape.blocks.saturating_mul(shape.block.into())))
    }

    /// Reads the shape of a block store from its parameters in the catalog; `None` if they are not those of a block
    /// store. A node may answer anything.
    pub fn of(parameters: &str) -> Option<Shape> {
        let shape: Shape = serde_json::from_str(parameters).ok()?;
        let is_sound = shape.stripe.is_none_or(|stripe| stripe.check().is_ok());
        let is_possible = shape.block > 0 && shape.blocks > 0;
        let is_small = shape.blocks.checked_mul(shape.block.into()).is_some_and(|bytes| bytes < 1 << 60);
        (is_sound && is_possible && is_small).then_some(shape)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parts_of_a_volume_have_all_its_blocks_and_names_of_their_own() {
        let stripe = |index| Stripe { volume: 0x0123_4567_89ab_cdef, index, count: 3 };
        for blocks in [3, 4, 5, 1000] {
            let of = |index| (0..blocks).filter(|block| block % 3 == index).count() as u64;
            assert_eq!([0, 1, 2].map(|index| stripe(index).share(blocks)), [0, 1, 2].map(of));
        }
        assert_eq!([0, 2].map(|index| stripe(index).store_name("v")), ["v", "v.01234567.2"]);
        assert_eq!(stripe(2).volume_name("v.01234567.2"), Some("v"));
        assert_eq!(stripe(1).volume_name("v.01234567.2"), None);
        let longest = Stripe { volume: u64::MAX, index: STRIPES_MAX - 1, count: STRIPES_MAX };
        assert!(longest.store_name(&"v".repeat(NAME_MAX)).len() <= 64);
    }

    #[test]
    fn impossible_shapes_are_refused() {
        let good = r#"{"block":512,"blocks":7,"writers":9,"stripe":{"volume":1,"index":0,"count":2}}"#;
        let stripe = Some(Stripe { volume: 1, index: 0, count: 2 });
        assert_eq!(Shape::of(good), Some(Shape { block: 512, blocks: 7, stripe }));
        assert!(Shape::of(r#"{"block":512,"blocks":7}"#).is_some());
        let largest = Shape::of(r#"{"block":512,"blocks":2251799813685247}"#).expect("below 2^60 bytes");
        assert_eq!(Shape::bytes([&largest]), (1 << 60) - 512);
        assert_eq!(Shape::bytes([&largest; 1024]), u64::MAX, "no node makes a client overflow");
        for bad in [
            "",
            "{}",
            r#"{"block":0,"blocks":7}"#,
            r#"{"block":512,"blocks":18446744073709551615}"#,
            r#"{"block":512,"blocks":7,"stripe":{"volume":1,"index":2,"count":2}}"#,
            r#"{"block":512,"blocks":7,"stripe":{"volume":1,"index":0,"count":99999}}"#,
        ] {
            assert_eq!(Shape::of(bad), None, "{bad}");
        }
    }
}
