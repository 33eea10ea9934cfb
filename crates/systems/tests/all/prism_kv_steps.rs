//! PRISM-KV while its table is rebuilt, step by step: the stories of `support/stepped`.

use crate::support::stepped;

macro_rules! stories {
    ($($name:ident: $case:ident;)*) => {$(
        #[test]
        fn $name() {
            stepped::$case();
        }
    )*};
}

stories! {
    every_step_among_operations_of_clients_with_any_catalog: every_step_among_operations;
    a_new_key_is_seen_by_whoever_knows_the_former_table_alone: a_new_key_is_seen;
    a_frozen_slot_is_waited_for_and_moved_by_the_next_node: a_frozen_slot_is_waited_for;
    a_version_of_an_earlier_life_never_matches: a_version_of_an_earlier_life;
    a_table_stays_while_a_chain_may_be_in_it: a_table_stays;
    keys_for_which_there_is_no_place_move_to_a_further_table: no_place;
    keys_that_were_chosen_to_collide_in_the_further_table_move_to_the_one_after_it: chosen_keys;
    keys_without_a_place_can_be_deleted_where_there_is_no_memory_for_a_further_table: no_place_nor_memory;
    a_full_path_of_a_table_that_was_left_since_is_no_refusal: a_full_path;
}
