//! The server of an echo: takes a message of requests, fetches all items with overlapping cache misses, and replies.
//!
//! Invariant: each request is answered once, in order.

use std::io;

use rustix::param::page_size;

use super::message::{ECHO, FETCH};
use super::{Echo, Poller, TASKS_MAX};
use crate::floor::table::{Key, Table, VALUE, key, value_byte};

/// Server's end of a channel, over any medium.
pub(super) trait ServerEnd {
    /// Number of polls before the server yields the CPU.
    const POLLS_PER_YIELD: u32;

    /// Takes and answers one message, if one has arrived.
    fn turn(&mut self, source: &ItemSource) -> io::Result<Turn>;
}

/// Outcome of [`ServerEnd::turn`], which tries to take and answer a message.
pub(super) enum Turn {
    Nothing,
    Answered,
    /// The client has closed the channel.
    Closed,
}

/// Answers messages until the client closes the channel.
pub(super) fn serve<S: ServerEnd>(mut far: S, source: &ItemSource) -> io::Result<()> {
    let mut poller = Poller::new(S::POLLS_PER_YIELD, None);
    loop {
        match far.turn(source)? {
            Turn::Nothing => poller.wait()?,
            Turn::Answered => poller.renew(),
            Turn::Closed => return Ok(()),
        }
    }
}

/// Source of the items that the server returns.
pub(super) enum ItemSource {
    /// The server fetches each item from this table.
    Fetch(Table),
    /// The server returns this item, which stays in the cache.
    Bare(Vec<u8>),
}

impl ItemSource {
    pub(super) fn new(echo: &Echo) -> io::Result<Self> {
        Ok(if echo.bare {
            Self::Bare(vec![0; echo.item_size()])
        } else {
            Self::Fetch(Table::build(echo.layout)?)
        })
    }

    /// Returns the size in bytes of a page of the memory that is read.
    pub(super) fn page_size(&self) -> usize {
        match self {
            Self::Fetch(table) => table.page_size(),
            Self::Bare(_) => page_size(),
        }
    }

    /// Returns the op that all requests must have.
    pub(super) fn op(&self) -> u32 {
        match self {
            Self::Fetch(_) => FETCH,
            Self::Bare(_) => ECHO,
        }
    }

    /// Copies the items of the keys `numbers` (at most [`TASKS_MAX`]) into `items`, one item each. Bit i of the result
    /// states whether item i was found.
    #[inline(always)]
    pub(super) fn answer<'a>(&self, numbers: &[u64], items: impl Iterator<Item = &'a mut [u8]>) -> u64 {
        match self {
            Self::Fetch(table) => match numbers {
                [number] => items.fold(0, |_, item| {
                    let key = key(*number);
                    u64::from(table.fetch(&key, table.home(&key), item))
                }),
                _ => fetch(table, numbers, items),
            },
            Self::Bare(at_hand) => {
                for (&number, item) in numbers.iter().zip(items) {
                    item[..at_hand.len()].copy_from_slice(at_hand);
                    item[VALUE - size_of::<Key>()..VALUE].copy_from_slice(&key(number));
                    if let [.., last] = &mut item[VALUE..at_hand.len()] {
                        *last = value_byte(number, at_hand.len() - VALUE - 1);
                    }
                }
                u64::MAX
            }
        }
    }
}

/// Fetches all slots, then all items, then copies the items. Bit i of the result states whether item i was found.
#[inline(always)]
fn fetch<'a>(table: &Table, numbers: &[u64], items: impl Iterator<Item = &'a mut [u8]>) -> u64 {
    let mut homes = [0; TASKS_MAX];
    for (home, &number) in homes.iter_mut().zip(numbers) {
        *home = table.home(&key(number));
        table.prefetch_slot(*home);
    }
    for &home in &homes[..numbers.len()] {
        table.prefetch_item(home);
    }
    let mut found = 0;
    for (index, ((&number, &home), item)) in numbers.iter().zip(&homes).zip(items).enumerate() {
        found |= u64::from(table.fetch(&key(number), home, item)) << index;
    }
    found
}
