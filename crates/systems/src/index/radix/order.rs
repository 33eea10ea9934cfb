//! Numbers of things in the order of their keys, in little memory: the things have the keys, and blocks the numbers.
//!
//! A cache has an entry for every few records, and a map of keys would take a fifth of its memory.
//!
//! Invariant: no block is empty, and the numbers in and across the blocks are in the order of their keys.

/// Largest number of things in a block.
const BLOCK_MAX: usize = 256;

/// Numbers in the order of their keys. Each function is given the one that returns the key of a number.
#[derive(Default)]
pub(super) struct Order {
    blocks: Vec<Vec<u32>>,
}

impl Order {
    /// Returns the number with the largest key up to `key`.
    pub(super) fn last_up_to<K: Ord>(&self, key: &K, key_of: impl Fn(u32) -> K) -> Option<u32> {
        let (block, index) = self.behind(key, key_of);
        Some(self.blocks.get(block)?[index.checked_sub(1)?])
    }

    /// Adds a number, whose key no other one has.
    pub(super) fn insert<K: Ord>(&mut self, number: u32, key_of: impl Fn(u32) -> K) {
        let (block, index) = self.behind(&key_of(number), key_of);
        if self.blocks.is_empty() {
            self.blocks.push(Vec::with_capacity(BLOCK_MAX));
        }
        let numbers = &mut self.blocks[block];
        if numbers.len() < BLOCK_MAX {
            return numbers.insert(index, number);
        }
        let mut upper = Vec::with_capacity(BLOCK_MAX);
        upper.extend(numbers.drain(BLOCK_MAX / 2..));
        match index.checked_sub(BLOCK_MAX / 2) {
            Some(index) => upper.insert(index, number),
            None => numbers.insert(index, number),
        }
        self.blocks.insert(block + 1, upper);
    }

    /// Removes the number with this key, if there is one.
    pub(super) fn remove<K: Ord>(&mut self, key: &K, key_of: impl Fn(u32) -> K) {
        let (block, index) = self.behind(key, &key_of);
        let Some(index) = index.checked_sub(1) else { return };
        if key_of(self.blocks[block][index]) == *key {
            self.blocks[block].remove(index);
            if self.blocks[block].is_empty() {
                self.blocks.remove(block);
            }
        }
    }

    /// Place behind all numbers with keys up to `key`: a block, and an index in it that is 0 only in the first block.
    fn behind<K: Ord>(&self, key: &K, key_of: impl Fn(u32) -> K) -> (usize, usize) {
        let block = self.blocks.partition_point(|block| key_of(block[0]) <= *key).saturating_sub(1);
        let numbers = self.blocks.get(block).map_or(&[][..], Vec::as_slice);
        (block, numbers.partition_point(|number| key_of(*number) <= *key))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn an_order_is_that_of_a_set() {
        let (mut order, mut set) = (Order::default(), BTreeSet::new());
        let key_of = |number: u32| u64::from(number) * 8;
        let mut draw = 1_u64;
        for round in 0..40_000 {
            draw = draw.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let number = (draw >> 33) as u32 % 3000;
            // It grows, and then shrinks to nothing.
            if draw >> 63 == u64::from(round < 20_000) || round > 30_000 {
                order.remove(&key_of(number), key_of);
                set.remove(&number);
            } else if set.insert(number) {
                order.insert(number, key_of);
            }
            let key = (draw >> 20) % 25_000;
            let expected = set.range(..=(key / 8) as u32).next_back().copied();
            assert_eq!(order.last_up_to(&key, key_of), expected);
        }
        assert!(order.blocks.iter().flatten().eq(&set));
        while let Some(number) = set.pop_first() {
            order.remove(&key_of(number), key_of);
        }
        assert!(order.blocks.is_empty());
    }
}
