//! Enumerations whose variants have numbers, in shared memory or in packets.

/// Defines an enumeration with a number for each variant and a conversion from numbers.
macro_rules! numbered {
    (
        $(#[$meta:meta])*
        pub enum $name:ident: $number:ident, $from:ident {
            $($(#[$doc:meta])* $variant:ident = $n:literal,)+
        }
    ) => {
        $(#[$meta])*
        #[repr($number)]
        pub enum $name {
            $($(#[$doc])* $variant = $n,)+
        }

        impl $name {
            /// Returns the variant with this number; `None` for unassigned numbers.
            pub fn $from(n: $number) -> Option<Self> {
                match n {
                    $($n => Some($name::$variant),)+
                    _ => None,
                }
            }
        }
    };
}

pub(crate) use numbered;
